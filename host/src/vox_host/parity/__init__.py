"""The same requests on several plugins, or several ways of one: are the bytes equal, and if not, from where?

`sides` says what is compared, `requests` what is asked, `run` asks, `compare` finds the first
difference, `certificate` is what is kept. `training` and `training_run` do the same for steps of
training. The table and the file are the command line's.
"""
