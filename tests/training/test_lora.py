"""Training of adapters (LoRA): what is published, and that a restart gives the same bits."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.training.checkpoint import Checkpoint, CheckpointError, OtherModel
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.adapters import ADAPTER_CONFIG, digest_of_model
from asyncrl.weights.files.store import FileStore
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.merging import merged
from asyncrl.weights.model_folder import write_model
from asyncrl.weights.verify import TornVersion, check_version
from harness.families import write_with_images
from harness.roles import LORA, TO_REFERENCE, assert_same_bits, scored, with_penalties
from harness.training import copies, policy_rows, save
from topics.batches import Objective


def with_lora(models):
    return TorchTrainer(models / "policy", TorchSettings(lora=LORA))


def test_adapters_begin_as_nothing_and_are_published_in_full_weights(models, tmp_path):
    trainer, rows = with_lora(models), policy_rows(np.random.default_rng(1), 12)
    plain = TorchTrainer(models / "policy")
    assert_same_bits(plain, trainer)
    assert np.array_equal(scored(plain, rows, "proximal"), scored(trainer, rows, "proximal"))

    for _ in range(3):
        trainer.step(rows, Objective(learning_rate=1e-2))
    before, after = copies(plain), copies(trainer)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {
        f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")
    }
    (tmp_path / "out").mkdir()
    write_model(DiskFolder(tmp_path / "out"), trainer.copy_weights().files(), trainer.source)
    merged = scored(TorchTrainer(tmp_path / "out"), rows, "proximal")
    assert np.allclose(merged, scored(trainer, rows, "proximal"), atol=1e-5)
    assert not np.allclose(merged, scored(plain, rows, "proximal"), atol=1e-2)


def test_training_of_adapters_resumes_bit_equal_and_peft_reads_their_checkpoint(models, tmp_path):
    rng = np.random.default_rng(3)
    batches = [policy_rows(rng, 12) for _ in range(4)]
    whole, first, second = (with_lora(models) for _ in range(3))
    for rows in batches:
        whole.step(rows, with_penalties(TO_REFERENCE))
    for rows in batches[:2]:
        first.step(rows, with_penalties(TO_REFERENCE))
    publisher = Publisher(first, store=FileStore(tmp_path / "weights"), checkpoints=tmp_path)
    publisher.copy_state()
    saved = publisher.save(Checkpoint(0, 2, "0" * 32, 1))
    second.load(saved)
    for rows in batches[2:]:
        second.step(rows, with_penalties(TO_REFERENCE))

    assert_same_bits(whole, second)
    for other, words in (
        (None, "rank 0"),
        (dataclasses.replace(LORA, rank=2), "rank 2 and alpha 8 on"),
        (dataclasses.replace(LORA, alpha=16.0), "rank 4 and alpha 16 on"),
        (dataclasses.replace(LORA, targets=("q_proj",)), "rank 4 and alpha 8 on q_proj;"),
    ):
        trainer = TorchTrainer(models / "policy", TorchSettings(lora=other))
        with pytest.raises(OtherModel, match=f"rank 4 and alpha 8 on down_proj, q_proj, the learner's have {words}"):
            trainer.load(saved)
    TorchTrainer(models / "policy", TorchSettings(lora=dataclasses.replace(LORA, targets=LORA.targets[::-1]))).load(
        saved
    )
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models / "policy"), saved)
    merged = model.merge_and_unload().state_dict()
    for name, tensor in copies(first).items():
        assert torch.allclose(merged[name], tensor, atol=1e-6), name


def test_adapters_begin_anew_on_a_checkpoint_without_any(models, tmp_path):
    plain, adapted, rows = TorchTrainer(models / "policy"), with_lora(models), policy_rows(np.random.default_rng(1), 12)
    plain.step(rows, Objective(learning_rate=1e-2))
    save(plain, tmp_path)

    adapted.load(tmp_path)

    assert_same_bits(plain, adapted)
    assert adapted.step(rows, Objective(learning_rate=1e-2))["grad_norm"] > 0


def test_adapters_begin_anew_on_a_checkpoint_with_a_reference(models, tmp_path):
    plain, adapted, rows = TorchTrainer(models / "policy"), with_lora(models), policy_rows(np.random.default_rng(1), 12)
    for _ in range(2):
        plain.step(rows, with_penalties(TO_REFERENCE))
    save(plain, tmp_path)

    adapted.load(tmp_path)

    assert np.array_equal(scored(adapted, rows, "reference"), scored(plain, rows, "reference"))
    assert not np.array_equal(scored(adapted, rows, "reference"), scored(adapted, rows, "proximal"))


PUBLISHED = dataclasses.replace(LORA, published=True)


def publisher_of(trainer, folder):
    return Publisher(trainer, store=FileStore(folder / "weights"), checkpoints=folder / "checkpoints")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_is_added_to_the_model_has_the_bits_of_the_version_that_is_merged(models, tmp_path, dtype):
    rows = policy_rows(np.random.default_rng(1), 12)
    merging, adapting = (
        TorchTrainer(models / "policy", TorchSettings(lora=lora, dtype=dtype)) for lora in (LORA, PUBLISHED)
    )
    for trainer in (merging, adapting):
        for _ in range(3):
            trainer.step(rows, Objective(learning_rate=1e-2))
    publisher = publisher_of(adapting, tmp_path)
    publisher.copy_weights()
    version = publisher.publish(lineage=0, version=3)
    directory = Path(version.location)
    base = load_file(models / "policy" / "model.safetensors")

    own = copies(merging)
    found = merged(base, directory)

    check_version(directory, version.digest)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert version.adapts == digest_of_model(models / "policy")
    assert version.bytes < sum(one.nbytes for one in own.values()) / 2
    assert copies_of_model(adapting).keys() == own.keys()
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models / "policy"), directory)
    for name, tensor in model.merge_and_unload().state_dict().items():
        assert torch.allclose(tensor.to(own[name].dtype), own[name], atol=1e-6 if dtype == "float32" else 2e-3), name


def test_an_adapter_fits_the_names_of_a_model_with_images(tmp_path):
    write_with_images(tmp_path / "model")
    trainer = TorchTrainer(tmp_path / "model", TorchSettings(lora=PUBLISHED))
    trainer.step(policy_rows(np.random.default_rng(1), 6), Objective(learning_rate=1e-2))
    publisher = publisher_of(trainer, tmp_path)
    publisher.copy_weights()
    base = load_file(tmp_path / "model" / "model.safetensors")

    found = merged(base, Path(publisher.publish(lineage=0, version=1).location))

    changed = {name for name, one in base.items() if not torch.equal(found[name], one)}
    assert changed == {name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))}


def copies_of_model(trainer):
    return {one.name: one for tensors in trainer.copy_weights(whole=True).files().values() for one in tensors}


def test_adapters_with_the_same_tensors_are_other_versions_where_they_count_otherwise(models, tmp_path):
    digests = set()
    for number, lora in enumerate((PUBLISHED, PUBLISHED, dataclasses.replace(PUBLISHED, alpha=16.0))):
        publisher = publisher_of(TorchTrainer(models / "policy", TorchSettings(lora=lora)), tmp_path / str(number))
        publisher.copy_weights()
        version = publisher.publish(lineage=0, version=0)
        assert publisher.digest() == version.digest
        digests.add(version.digest)
        (Path(version.location) / ADAPTER_CONFIG).write_bytes(b"{}")
        with pytest.raises(TornVersion, match="tensors differ from its manifest"):
            check_version(Path(version.location), version.digest)
    assert len(digests) == 2


def test_no_adapter_is_published_of_weights_that_were_trained_before(models, tmp_path):
    plain, rows = TorchTrainer(models / "policy"), policy_rows(np.random.default_rng(1), 12)
    plain.step(rows, Objective(learning_rate=1e-2))
    save(plain, tmp_path)
    adapting, merging = (TorchTrainer(models / "policy", TorchSettings(lora=lora)) for lora in (PUBLISHED, LORA))
    for trainer in (adapting, merging):
        trainer.load(tmp_path)

    merging.copy_weights()
    with pytest.raises(
        CheckpointError, match=r"trained before there were adapters, or the files have changed since; put"
    ):
        adapting.copy_weights()

    merged_run = TorchTrainer(models / "policy", TorchSettings(lora=LORA))
    merged_run.step(rows, Objective(learning_rate=1e-2))
    (tmp_path / "other").mkdir()
    save(merged_run, tmp_path / "other")
    adapting.load(tmp_path / "other")
    adapting.copy_weights()
