"""Does a plugin compute what it says it does? The suite behind `vox-host plugin check`.

The host holds what is right (`expected`, recorded from the scalar reference), the plugin computes
in real workers over the real protocol, and `groups` compare. `suite` runs them, `verdict` says
what came of it, `record` keeps it beside the receipt.
"""
