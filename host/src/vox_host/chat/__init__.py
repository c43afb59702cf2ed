"""From messages to a prompt, and from tokens to text. Pure but for `template`, which renders in a child.

`messages` validates a conversation, `protection` keeps what its author wrote from being read as
control tokens, `rendering` runs a model's template (in the child process that `template` owns), and
`text_stream` turns token bytes into text deltas. `templates` has named ones for models without.
"""
