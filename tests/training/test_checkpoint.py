import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.data.model_dir import ModelError, check_model_directory
from asyncrl.training.checkpoint import Checkpoint, CheckpointError, OtherModel, read_checkpoint, write_checkpoint
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.tensors import file_record
from harness.training import save as save_state

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=^ "
CHECKPOINT = Checkpoint(lineage=0, step=12, digest="0123456789abcdef" * 2, batch_sequence=77, extra={"seed": 3})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "demo"
    create_model(directory, alphabet=ALPHABET, seed=0)
    return directory


def save(directory):
    (directory / "a.safetensors").write_bytes(b"weights" * 100)
    (directory / "b.safetensors").write_bytes(b"state")
    return {path.name: file_record(path) for path in directory.iterdir()}


def test_the_demo_model_has_its_104k_parameters_and_its_vocabulary(model):
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)

    assert sum(parameter.numel() for parameter in network.parameters()) == 104_256
    assert network.config.rope_parameters["rope_theta"] == 1e4
    text = "^abc xyz=" + "zyx cba"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text)
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert network.generation_config.eos_token_id == 2
    assert check_model_directory(model) == ("Qwen3ForCausalLM", 43, 64, 0, 2, 0)


def test_a_character_outside_the_alphabet_is_an_error(model):
    with pytest.raises(Exception, match="UNK"):
        AutoTokenizer.from_pretrained(model)("A")


def test_the_same_seed_makes_the_same_model(model, tmp_path):
    create_model(tmp_path / "same", alphabet=ALPHABET, seed=0)
    create_model(tmp_path / "other", alphabet=ALPHABET, seed=1)
    expected = (model / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == expected
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != expected


def test_a_model_is_not_made_over_another(model):
    with pytest.raises(FileExistsError, match="not empty"):
        create_model(model, alphabet=ALPHABET, seed=0)


def test_an_alphabet_names_each_character_once(tmp_path):
    with pytest.raises(ValueError, match="only once"):
        create_model(tmp_path / "new", alphabet="aba", seed=0, shape=ModelShape(hidden=32))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"cannot read config.json \(No such file"),
        ("config.json", b"{", "config.json is not a JSON object"),
        ("config.json", b"[]", "config.json is not a JSON object .*got `array`"),
        (
            "config.json",
            b'{"architectures": ["BertForMaskedLM"]}',
            "found BertForMaskedLM, expected a causal language model",
        ),
        ("config.json", b'{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 3}', "max_position_embeddings None"),
        (
            "config.json",
            b'{"architectures":["Qwen3ForCausalLM"],"vocab_size":3,"max_position_embeddings":9,"num_experts":"x"}',
            r"config.json has no number of layers or experts \(invalid literal .*fetch it again",
        ),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("model.safetensors", None, "model.safetensors holds no whole weights .*No such file"),
        ("model.safetensors", b"", "model.safetensors holds no whole weights .*too small"),
        ("model.safetensors", b"abc", "model.safetensors holds no whole weights .*too small"),
        ("model.safetensors", b"{}" * 50, "model.safetensors holds no whole weights .*too large"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}x", "model.safetensors holds no whole weights .*not fully covered"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"w": "model-2.safetensors"}}',
            "model-2.safetensors holds no whole weights .*No such",
        ),
    ],
)
def test_a_torn_model_directory_is_refused(tmp_path, file, content, message):
    directory = tmp_path / "model"
    create_model(directory, alphabet="ab", seed=0, shape=ModelShape(hidden=32, layers=1))
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        check_model_directory(directory)


def test_weights_that_are_no_safetensors_are_refused_with_the_way_to_convert_them(tmp_path):
    create_model(tmp_path / "model", alphabet="ab", seed=0)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model-00001-of-00001.bin")

    with pytest.raises(ModelError, match=r"weights in pytorch_model-00001-of-00001.bin, expected .*save_pretrained"):
        check_model_directory(tmp_path / "model")


def test_weights_cut_short_are_refused(tmp_path):
    create_model(tmp_path / "model", alphabet="ab", seed=0)
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"model.safetensors holds no whole weights .*not fully covered"):
        check_model_directory(tmp_path / "model")


def test_a_shard_cut_short_is_refused_by_its_name(tmp_path):
    create_model(tmp_path, alphabet="ab", seed=0, shape=ModelShape(hidden=32, layers=1))
    weights, names = load_file(tmp_path / "model.safetensors"), ("model-1.safetensors", "model-2.safetensors")
    shards = {name: names[index % 2] for index, name in enumerate(weights)}
    for file in names:
        save_file({name: weights[name] for name in weights if shards[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "model.safetensors").unlink()
    check_model_directory(tmp_path)

    os.truncate(tmp_path / names[1], (tmp_path / names[1]).stat().st_size - 1)
    with pytest.raises(ModelError, match=r"model-2.safetensors holds no whole weights .*not fully covered.*fetch it"):
        check_model_directory(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    for name, hidden in (("small", 32), ("large", 64)):
        create_model(tmp_path / name, alphabet="ab", seed=0, shape=ModelShape(hidden=hidden, layers=1))
    trainers = {name: TorchTrainer(tmp_path / name, TorchSettings()) for name in ("small", "large")}
    (tmp_path / "saved").mkdir()
    save_state(trainers["small"], tmp_path / "saved")

    with pytest.raises(OtherModel, match=r"has shape .*32.*, the model in .*large has .*64.*; a checkpoint"):
        trainers["large"].load(tmp_path / "saved")


def test_a_missing_model_directory_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is no directory"):
        check_model_directory(tmp_path / "nowhere")


def test_a_checkpoint_reads_back_what_was_written(tmp_path):
    directory = write_checkpoint(tmp_path / "checkpoints", CHECKPOINT, save)

    assert directory == tmp_path / "checkpoints" / "step000012-lineage0-0123456789ab"
    found = read_checkpoint(directory)
    assert (found.lineage, found.step, found.digest, found.batch_sequence, found.extra) == (
        0,
        12,
        CHECKPOINT.digest,
        77,
        {"seed": 3},
    )
    assert sorted(found.files) == ["a.safetensors", "b.safetensors"]
    assert os.listdir(tmp_path / "checkpoints") == [directory.name]


def test_a_checkpoint_is_never_written_twice(tmp_path):
    first = write_checkpoint(tmp_path, CHECKPOINT, save)
    assert write_checkpoint(tmp_path, CHECKPOINT, lambda directory: pytest.fail("written again")) == first


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("a.safetensors", lambda path: os.truncate(path, 699), "a.safetensors: 699 bytes .* expected 700"),
        ("b.safetensors", lambda path: path.write_bytes(b"stale"), "b.safetensors: 5 bytes with xxh3"),
        ("a.safetensors", lambda path: path.unlink(), "a.safetensors: No such file"),
        ("checkpoint.json", lambda path: path.unlink(), "checkpoint.json: No such file"),
        ("checkpoint.json", lambda path: os.truncate(path, 20), "checkpoint.json: .* torn"),
    ],
)
def test_a_torn_checkpoint_is_refused_and_names_the_file(tmp_path, file, spoil, message):
    directory = write_checkpoint(tmp_path, CHECKPOINT, save)
    spoil(directory / file)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(directory)


def test_a_record_that_is_no_text_is_torn(tmp_path):
    directory = write_checkpoint(tmp_path, CHECKPOINT, save)
    written = (directory / "checkpoint.json").read_bytes()
    for place in range(len(written)):  # with its highest bit a byte is no text
        spoilt = bytearray(written)
        spoilt[place] ^= 0x80
        (directory / "checkpoint.json").write_bytes(spoilt)
        with pytest.raises(CheckpointError, match=r"checkpoint.json: .* torn"):
            read_checkpoint(directory)


def test_a_record_in_which_any_bit_is_flipped_is_torn(tmp_path):
    directory = write_checkpoint(tmp_path, CHECKPOINT, save)
    path = directory / "checkpoint.json"
    written = path.read_bytes()
    for place in range(len(written)):
        spoilt = bytearray(written)
        spoilt[place] ^= 1  # of a digit it makes another one: of `batch_sequence`, too
        path.write_bytes(spoilt)
        with pytest.raises(CheckpointError, match=r"checkpoint.json: .* torn"):
            read_checkpoint(directory)


def test_a_record_of_a_version_that_wrote_no_checksum_is_read(tmp_path):
    directory = write_checkpoint(tmp_path, CHECKPOINT, save)
    record = json.loads((directory / "checkpoint.json").read_text())
    del record["xxh3"]
    (directory / "checkpoint.json").write_text(json.dumps(record))

    assert read_checkpoint(directory).batch_sequence == CHECKPOINT.batch_sequence


def test_a_torn_checkpoint_is_written_anew_under_its_name(tmp_path):
    directory = write_checkpoint(tmp_path, CHECKPOINT, save)
    os.truncate(directory / "a.safetensors", 699)

    assert write_checkpoint(tmp_path, CHECKPOINT, save) == directory

    assert read_checkpoint(directory).files["a.safetensors"].bytes == 700
    assert os.listdir(tmp_path) == [directory.name]


def test_a_checkpoint_under_another_name_is_refused(tmp_path):
    directory = write_checkpoint(tmp_path, CHECKPOINT, save)
    with pytest.raises(CheckpointError, match="holds checkpoint step000012-lineage0"):
        read_checkpoint(directory.rename(tmp_path / "latest"))


def test_what_a_killed_writer_left_is_no_checkpoint_and_in_nobodys_way(tmp_path):
    left = tmp_path / f".{CHECKPOINT.name}.99999999.partial"  # no process has that number
    left.mkdir()
    (left / "half").write_bytes(b"x")

    directory = write_checkpoint(tmp_path, CHECKPOINT, save)

    assert sorted(read_checkpoint(directory).files) == ["a.safetensors", "b.safetensors"]
    assert not left.exists()


NO_ROOM = """
import resource, sys
from pathlib import Path
import numpy as np
from asyncrl.training.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.tensors import HostTensor, write_tensors
root, checkpoint = Path(sys.argv[1]), Checkpoint(lineage=0, step=12, digest=sys.argv[2], batch_sequence=77)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
tensor = HostTensor("w", "uint8", [200_000], np.zeros(200_000, np.uint8))
writers = [
    lambda directory: write_tensors(DiskFolder(directory), {"w": [tensor]}),
    lambda directory: (directory / "w.bin").write_bytes(bytes(200_000)),
]
for write in writers:
    try:
        write_checkpoint(root, checkpoint, write)
    except CheckpointError as error:
        print(error)
"""


def test_a_disk_that_takes_no_more_leaves_only_the_previous_checkpoint(tmp_path):
    previous = write_checkpoint(tmp_path, Checkpoint(lineage=0, step=11, digest="f" * 32, batch_sequence=70), save)
    repository = str(Path(__file__).parents[2])

    # A limit on the size of files stands in for the full disk: writes fail in the same place.
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(tmp_path), CHECKPOINT.digest],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": repository},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.count("step000012-lineage0-0123456789ab could not be written: ") == 2
    assert done.stdout.count("File too large") == 2
    assert os.listdir(tmp_path) == [previous.name]
    assert read_checkpoint(previous).step == 11


def test_checkpoints_are_readable_by_any_program(tmp_path):
    record = json.loads((write_checkpoint(tmp_path, CHECKPOINT, save) / "checkpoint.json").read_text())
    assert record["files"]["b.safetensors"]["bytes"] == 5
    assert (record["lineage"], record["step"], record["batch_sequence"]) == (0, 12, 77)
