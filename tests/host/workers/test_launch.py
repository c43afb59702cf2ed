from vox_host.workers import worker_environment

INHERITED = {
    "PATH": "/bin",
    "HOME": "/home/a",
    "LC_ALL": "C.UTF-8",
    "NCCL_P2P_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "1",
    "VOX_API_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "PYTHONPATH": "/somewhere",
    "LD_PRELOAD": "/evil.so",
    "SSH_AUTH_SOCK": "/run/agent",
    "LCX": "not a locale",
    "NCCLX": "not NCCL's",
    "HTTPS_PROXY": "http://user:secret@proxy",
}


def test_a_worker_gets_the_allowed_names_and_no_other() -> None:
    environment = worker_environment(INHERITED, {"VOX_MARK": "x"}, 7)
    assert environment == {
        "PATH": "/bin",
        "HOME": "/home/a",
        "LC_ALL": "C.UTF-8",
        "NCCL_P2P_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "VOX_MARK": "x",
        "VOX_PLUGIN_FD": "7",
    }


def test_a_plan_cannot_point_the_worker_at_another_descriptor() -> None:
    assert worker_environment({}, {"VOX_PLUGIN_FD": "0"}, 7)["VOX_PLUGIN_FD"] == "7"
