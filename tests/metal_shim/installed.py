"""The Metal plugin as a host installs it, with the CPU in the GPU's place: its own code, another runtime.

    python -m metal_shim.installed HOME

makes a home with it, for `VOX_HOME=HOME vox-host plugin check mens-torch-mps` (docs/certificates/README.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

import mens_torch_mps
from fixtures.installed_lane import InstalledLane, install_lane
from metal_shim.stand_in import LABEL

__all__ = ["install_on_cpu", "manifest_on_cpu"]

_PACKAGE = Path(mens_torch_mps.__file__).parent
_CODE = """
import sys

sys.path += {paths!r}


def backend():
    import torch
    from mens_torch_mps.plugin import backend_on
    from metal_shim.stand_in import fill_new_memory, started_on_cpu

    torch.set_num_threads(1)
    fill_new_memory()
    return backend_on(started_on_cpu())
"""


def manifest_on_cpu() -> str:
    """Return the plugin's own manifest, with the label, and without what only a Mac has."""
    text = (_PACKAGE / "Plugin.toml").read_text()
    for old, new in {
        'lane = "metal"\n': f'lane = "metal"\nexecution = "{LABEL}"\n',
        'os = ["macos"]': 'os = ["linux", "macos"]',
        'devices = ["apple :: macos >= 15.0"]': "devices = []",
        'version = "0.1.0"': 'version = "1.0.0"',
    }.items():
        if text.count(old) != 1:
            raise AssertionError(f"{old!r} is not in Plugin.toml")
        text = text.replace(old, new)
    return text


def install_on_cpu(home: Path, manifest: str | None = None) -> InstalledLane:
    """Install it into `home`; `manifest` is another one, for tests of what is refused."""
    code = _CODE.format(paths=[str(_PACKAGE.parent), str(Path(__file__).parents[1])])
    return install_lane(home, "mens-torch-mps", code, manifest or manifest_on_cpu())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m metal_shim.installed HOME; nothing was installed")
    if (Path(sys.argv[1]) / "plugins").exists():
        sys.exit(f"{sys.argv[1]} has plugins already; nothing was installed. Name a new folder.")
    install_on_cpu(Path(sys.argv[1]).absolute())
