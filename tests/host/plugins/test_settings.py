"""The environment's values, and what is said about bad ones."""

from pathlib import Path

import pytest

from vox_host.errors import UsageError
from vox_host.settings import GIB, load_settings, tool_environment


def test_vox_home_is_where_everything_lies(tmp_path: Path) -> None:
    settings = load_settings({"VOX_HOME": str(tmp_path)})
    assert (settings.plugins_dir, settings.models_dir, settings.log_dir) == (
        tmp_path / "plugins",
        tmp_path / "models",
        tmp_path / "log",
    )


def test_without_variables_the_documented_defaults_hold() -> None:
    settings = load_settings({"HOME": "/home/someone"})
    assert settings.unified_memory_reserve_bytes == 12 * GIB
    assert settings.vram_safety == 0.88
    assert settings.api_key is None
    assert settings.home.name == "vox-host"


def test_numbers_come_from_their_variables() -> None:
    values = {"VOX_HOME": "/v", "VOX_MENS_UNIFIED_MEM_RESERVE_GIB": "1.5", "VOX_MENS_VRAM_SAFETY": "0.5"}
    settings = load_settings(values)
    assert settings.unified_memory_reserve_bytes == 3 * GIB // 2
    assert settings.vram_safety == 0.5


@pytest.mark.parametrize("text", ["", "much", "nan", "-1", "inf", "1e9"])
def test_a_reserve_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings({"VOX_HOME": "/v", "VOX_MENS_UNIFIED_MEM_RESERVE_GIB": text})
    assert [name for name, _ in caught.value.facts] == ["VOX_MENS_UNIFIED_MEM_RESERVE_GIB"]


def test_all_bad_values_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError) as caught:
        load_settings(
            {
                "VOX_HOME": str(file),
                "VOX_MENS_UNIFIED_MEM_RESERVE_GIB": "x",
                "VOX_MENS_VRAM_SAFETY": "1.5",
                "VOX_API_KEY": " ",
            }
        )
    assert [name for name, _ in caught.value.facts] == [
        "VOX_HOME",
        "VOX_MENS_UNIFIED_MEM_RESERVE_GIB",
        "VOX_MENS_VRAM_SAFETY",
        "VOX_API_KEY",
    ]


def test_an_empty_home_is_refused_and_not_taken_for_the_current_folder() -> None:
    with pytest.raises(UsageError):
        load_settings({"VOX_HOME": ""})


def test_installers_do_not_see_this_process_s_packages() -> None:
    values = tool_environment({"PATH": "/bin", "PYTHONPATH": "/mine", "VIRTUAL_ENV": "/venv"})
    assert "PYTHONPATH" not in values
    assert "VIRTUAL_ENV" not in values
    assert values["PATH"] == "/bin"


def test_a_private_index_set_for_pip_is_passed_on_to_uv() -> None:
    values = tool_environment({"PIP_INDEX_URL": "https://index.example/simple", "PIP_FIND_LINKS": "/a /b"})
    assert values["UV_DEFAULT_INDEX"] == "https://index.example/simple"
    assert values["UV_FIND_LINKS"] == "/a,/b"


def test_an_index_set_for_uv_stays() -> None:
    values = tool_environment({"PIP_INDEX_URL": "https://a.example", "UV_DEFAULT_INDEX": "https://b.example"})
    assert values["UV_DEFAULT_INDEX"] == "https://b.example"
