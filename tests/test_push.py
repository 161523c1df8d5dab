"""scripts.push: what it says without a login, and what arrives at a stand-in of the hub through its real client."""

import pytest
from hub_stand_in import serve

pytest.importorskip("transformers", reason="exporting needs pip install -r requirements-extras.txt")

from test_export import exported, fails, run  # noqa: F401

from scripts import push


@pytest.fixture
def hub(monkeypatch, tmp_path):
    import huggingface_hub.constants as constants

    with serve("hf_right") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def test_without_a_login_it_says_what_would_be_uploaded(exported, hub, capsys):  # noqa: F811
    push.main([str(exported), "me/model"])
    said = capsys.readouterr().out
    assert all(path.name in said for path in exported.iterdir()) and "hf auth login" in said
    assert f"{sum(path.stat().st_size for path in exported.iterdir()):,}  bytes" in said and not hub.requests


def test_with_a_login_every_file_arrives(run, exported, hub, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    push.main([str(exported), "me/model", "--dry-run"])
    assert "nothing was uploaded" in capsys.readouterr().out and not hub.requests
    push.main([str(run), "me/model", "--private"])  # it exports the run again
    assert capsys.readouterr().out.endswith(f"{hub.address}/me/model\n")
    assert hub.created["name"] == "model" and "private" in (hub.created.get("visibility"), *hub.created)
    assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}


def test_what_cannot_be_pushed_is_one_line(exported, tmp_path, hub, capsys, monkeypatch):  # noqa: F811
    assert "neither a run folder nor" in fails(capsys, push.main, tmp_path, "me/model")
    for repo in ("model", "../x", "a/b/c", "me/mo del"):
        assert repo in fails(capsys, push.main, exported, repo)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said = fails(capsys, push.main, exported, "me/model")
    assert "hf auth login" in said and "401" in said and "hf_wrong" not in said
