"""What the Mens lanes share.

`ops` is the operator contract a lane implements; `models` are written once over it;
`engine` batches sequences, `sampling` draws tokens, `backend` speaks the plugin protocol.
"""
