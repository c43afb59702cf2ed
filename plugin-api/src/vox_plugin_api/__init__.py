"""What the author of a vox-host backend plugin installs.

`backend` is what a plugin implements, `messages` what crosses the wire, `child` the
worker's main loop, `checkpoint` a strict reader of the model directories a worker is given.
"""
