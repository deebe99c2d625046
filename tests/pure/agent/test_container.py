"""What an agent makes of its container: where it may write, what memory is left, how it proves itself."""

import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers.certificates import authority
from surefoot.agent import coordinator_client as identity
from surefoot.agent.__main__ import placed
from surefoot.agent.staging_memory import MemoryHeadroom, StagingDemand, read_headroom, require, with_released
from surefoot.errors import ConfigurationError
from surefoot.settings import agent_settings

ROOT = Path("/run/surefoot")
SETTINGS = agent_settings(
    {
        "SUREFOOT_JOB_UID": "u",
        "SUREFOOT_WORKER_INDEX": "0",
        "SUREFOOT_WORKER_ATTEMPT": "0",
        "SUREFOOT_NODE": "n",
        "SUREFOOT_COORDINATOR_URL": "wss://coordinator:8443/v1/agents",
        "SUREFOOT_RUN_FOLDER": "/run/surefoot",
        "SUREFOOT_METRICS_PORT": "9464",
    }
)


def test_what_the_image_allows_stays_as_it_is() -> None:
    assert placed({"HOME": "/root"}, ROOT, lambda _: True, named=True) == {}


def test_a_read_only_root_finds_everything_in_the_run_folder() -> None:
    added = placed({"HOME": "/"}, ROOT, lambda _: False, named=False)
    assert added == {
        "HOME": "/run/surefoot/home",
        "TMPDIR": "/run/surefoot/tmp",
        "TORCHINDUCTOR_CACHE_DIR": "/run/surefoot/cache/torchinductor",
        "TRITON_CACHE_DIR": "/run/surefoot/cache/triton",
        "USER": "surefoot",
    }


def test_the_template_s_own_choice_is_kept() -> None:
    own = {"HOME": "/mine", "TMPDIR": "/scratch", "TRITON_CACHE_DIR": "/scratch/t", "LOGNAME": "me"}
    added = placed(own, ROOT, lambda path: path == "/mine", named=False)
    assert added == {}


def groups(folder: Path, limit: str, used: int, reclaimable: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")
    return folder


def machine(folder: Path, kilobytes: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 99 kB\nMemAvailable: {kilobytes} kB\n")
    return path


def test_room_is_what_the_limit_leaves_without_what_can_be_given_back(tmp_path: Path) -> None:
    found = read_headroom(groups(tmp_path, "1000", 700, 200), machine(tmp_path, 10))
    assert found == MemoryHeadroom(free=500, limit=1000, used=500)


def test_without_a_limit_the_machine_s_room_counts(tmp_path: Path) -> None:
    assert read_headroom(groups(tmp_path, "max", 700, 0), machine(tmp_path, 2)) == MemoryHeadroom(
        free=2048, limit=None, used=0
    )
    assert read_headroom(tmp_path / "none", tmp_path / "none") is None


def test_memory_that_does_not_fit_is_refused_with_the_numbers() -> None:
    require(StagingDemand(2, (250,)), MemoryHeadroom(500, 1000, 500))
    require(StagingDemand(2, (10**15,)), None)
    refused = (
        r"2 slots of 1\.20 GB for 4 ranks, 9\.60 GB of staging memory, do not fit: the container's memory limit is"
    )
    refused += r" 8\.00 GB and 3\.10 GB are in use; raise resources\.limits\.memory of the trainer by 4\.70 GB or more"
    with pytest.raises(OSError, match=refused):
        require(StagingDemand(2, (1_200_000_000,) * 4), MemoryHeadroom(4_900_000_000, 8_000_000_000, 3_100_000_000))
    with pytest.raises(OSError, match=r"2 slots of up to 6 bytes for 2 ranks, 18 bytes.*the machine has 10 bytes left"):
        require(StagingDemand(2, (6, 3)), MemoryHeadroom(10, None, 0))
    with pytest.raises(OSError, match="the machine has 10 bytes left"):
        require(StagingDemand(2, (6,)), MemoryHeadroom(10, 1000, 0))


def test_memory_that_is_given_back_first_counts_as_free() -> None:
    found = MemoryHeadroom(100, 1000, 900)
    with pytest.raises(OSError, match="do not fit"):
        require(StagingDemand(2, (150,)), found)
    require(StagingDemand(2, (150,)), with_released(found, 200))
    assert with_released(None, 200) is None


def test_a_token_s_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    settings = replace(SETTINGS, token="fixed", token_file=str(path))
    with pytest.raises(identity.NoToken, match=r"SUREFOOT_TOKEN_FILE.*projected"):
        identity.read_token(settings)
    path.write_text("")
    with pytest.raises(identity.NoToken, match="empty"):
        identity.read_token(settings)
    for text in ("first", "second"):
        path.write_text(f"{text}\n")
        assert identity.read_token(settings) == text
    assert identity.read_token(replace(settings, token_file="")) == "fixed"


def test_the_authority_must_be_one_and_the_line_encrypted() -> None:
    assert identity.tls_context(SETTINGS) is None
    with pytest.raises(ConfigurationError, match="PEM"):
        identity.tls_context(replace(SETTINGS, coordinator_ca="nonsense"))
    with pytest.raises(ConfigurationError, match="only wss://"):
        identity.tls_context(replace(SETTINGS, coordinator_ca="x", coordinator_url="ws://coordinator/v1/agents"))


def test_nothing_but_the_given_authority_is_trusted() -> None:
    context = identity.tls_context(replace(SETTINGS, coordinator_ca=authority("surefoot test").pem))
    assert context is not None
    assert len(context.get_ca_certs()) == 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_the_metrics_port_is_read() -> None:
    assert SETTINGS.metrics_port == 9464
