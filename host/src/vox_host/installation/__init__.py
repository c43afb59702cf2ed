"""Install and remove plugins: from a path to a verified environment with a receipt.

`sources` says what a path is, `wheel` what an archive holds, `payload` makes one that may be
placed, `tools` runs uv, pip and the interpreter, `distributions` reads what they placed, `store`
is the plugin folder (lock, leftovers, receipts), and `install` joins them.
"""

from vox_host.installation.install import Installed, install
from vox_host.installation.request import InstallRequest
from vox_host.installation.store import environments, remove, remove_remains

__all__ = ["InstallRequest", "Installed", "environments", "install", "remove", "remove_remains"]
