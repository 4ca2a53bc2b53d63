"""The megatron trainer in several layouts against the torch trainer, which runs transformers' models."""

import json

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.algorithms.losses import loss_of
from asyncrl.data.quantisation import quantised_as
from asyncrl.training.host_copy import Source
from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.memory import parameters_of
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.tensors import manifest_of_records, tensor_records
from harness.megatron_cases import (
    CAMPAIGN,
    EPS,
    EXPERTS,
    FAMILIES,
    FIGURES,
    FIRST,
    LATENT,
    LAYOUTS,
    OF_FAMILIES,
    OF_LATENT,
    OWN,
    REPLAYED,
    ROLES_SAVED_AT,
    ROUNDED,
    ROWS,
    SAVED_AT,
    SOURCES,
    WHOLE,
    WITH_ROLES,
    model_of,
    objective,
    packs,
    roles_objective,
    roles_rows,
    rows_of,
    scored_rows,
    state,
    trained_rows,
)
from harness.mixtures import SMALL, write_transformers_model
from harness.own_family import renamed, write_renamed
from harness.ranks import run_group
from harness.training import copies, save

pytestmark = pytest.mark.slow  # four processes with torch


def opened(folder, name, **further):
    return TorchTrainer(
        folder / name, TorchSettings(micro_batch_tokens=64, eps=EPS, replays=name in (EXPERTS, *REPLAYED), **further)
    )


LAYOUTS_TESTED = [pytest.param(case, marks=[pytest.mark.nightly] * (case in CAMPAIGN)) for case in LAYOUTS]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """A folder with what four processes found, and a checkpoint of the torch trainer that they went on from."""
    folder = tmp_path_factory.mktemp("megatron")
    for name in FAMILIES:
        write_transformers_model(folder / name, *SMALL[name])
    write_renamed(folder / "glm4", folder / OWN)
    for name in (FIRST, EXPERTS):
        trainer, state = opened(folder, name), folder / f"state-torch-{name}"
        for step in range(SAVED_AT):
            trainer.step(trained_rows(name, step), objective(step))
        state.mkdir()
        save(trainer, state)
    selected = [item for item in request.session.items if item.path == request.path]
    further = ["campaign"] if any(item.get_closest_marker("nightly") for item in selected) else []
    run_group(["-m", "tests.harness.megatron_cases"], 4, folder, *further, deadline_s=1200)  # minutes on two cores
    return folder


@pytest.fixture(scope="module")
def expected(results):
    """By model: figures of two steps, state between them, weights after it, and the first ones, by torch."""
    found = {}
    for model in (FIRST, EXPERTS):
        trainer, figures = opened(results, model), []
        begun = copies(trainer)
        for step in range(SAVED_AT + 1):
            before = state(trainer)
            metrics = trainer.step(trained_rows(model, step), objective(step))
            figures.append([metrics[name] for name in FIGURES])
        found[model] = torch.tensor(figures, dtype=torch.float64), before, copies(trainer), begun
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_that_of_transformers_whole_and_divided(results, name):
    trainer = opened(results, name)
    rows = trainer.with_gradient(scored_rows(name), loss_of(objective(0)))
    trainer._gradient(packs(rows), loss_of(objective(0)))
    named = trainer._policy.model.named_parameters()
    gradients = {
        one.name: one.tensor
        for key, parameter in named
        for one in trainer._policy.names.divided(
            Source("", key, parameter.grad, parameter.dtype), tuple(parameter.shape)
        )
    }
    with torch.no_grad():
        logprobs, entropies = trainer._policy(*trainer._passes.lay(scored_rows(name)).inputs)
    largest = max(float(one.abs().max()) for one in gradients.values())
    files = [file for case in OF_FAMILIES if (file := results / f"{name}-{case}.safetensors").is_file()]
    assert len(files) >= 1 + (name in WHOLE)
    for found in map(load_file, files):
        assert torch.allclose(found.pop("logprobs"), logprobs, rtol=0, atol=2e-6)
        assert torch.allclose(found.pop("entropies"), entropies, rtol=0, atol=2e-6)
        for key, one in copies(trainer).items():
            assert torch.equal(found.pop(f"weight.{key}"), one), key
        assert found.keys() == {f"gradient.{key}" for key in gradients}
        for key, one in gradients.items():
            assert float((found[f"gradient.{key}"] - one).abs().max()) < 2e-6 * largest, key


def test_keys_from_latents_are_those_of_all_ranks_that_share_a_document(results):
    whole, found = (
        load_file(results / f"{stem}.safetensors") for stem in (f"{LATENT}-one", f"scores-{LATENT}-{OF_LATENT}")
    )

    for name, one in found.items():
        assert torch.allclose(one, whole[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", [EXPERTS, LATENT])
def test_versions_in_fp8_have_one_digest_in_every_layout(results, name):
    trainer = opened(results, name, quantised=quantised_as(results / name, "fp8-blocks"))
    expected = manifest_of_records(tensor_records(trainer.copy_weights().files()))
    assert b"float8_e4m3fn" in expected
    for case in OF_FAMILIES:
        shares = [path.read_bytes() for path in results.glob(f"quantised-{name}-{case}-*.jsonl")]
        assert sorted(b"".join(shares).splitlines()) == sorted(expected.splitlines())


@pytest.mark.parametrize("case", [OF_FAMILIES[0], pytest.param(OF_FAMILIES[1], marks=pytest.mark.nightly)])
def test_a_family_of_ones_own_takes_one_file(results, case):
    found, known = (load_file(results / f"{name}-{case}.safetensors") for name in (OWN, "glm4"))

    expected = renamed(known)  # which are those of transformers
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        assert torch.equal(found[key], one), key


def assert_close(found, figures, after, begun):
    """The same steps: weights moved alike, and figures are the same but for the rows, which are those of a replica."""
    counted = torch.tensor([name not in ("rows", "rows_skipped") for name in FIGURES])
    assert torch.allclose(found["figures"][..., counted], figures[..., counted], rtol=1e-5, atol=1e-7)
    assert bool((found["figures"][..., ~counted] <= ROWS).all())
    assert_moved_alike({name: found[f"after.{name}"] for name in after}, after, begun)


def assert_moved_alike(found, after, begun):
    apart = torch.nn.utils.get_total_norm([found[name] - one for name, one in after.items()])
    moved = torch.nn.utils.get_total_norm([one - begun[name] for name, one in after.items()])
    assert apart / moved < 1e-5


@pytest.mark.parametrize("case", LAYOUTS_TESTED)
def test_losses_norms_and_updates_are_those_of_the_torch_trainer_in_any_layout(results, expected, case):
    figures, before, after, begun = expected[model_of(case)]
    found = load_file(results / f"{case}.safetensors")

    assert_close(found, figures, after, begun)
    assert {name for name in found if not name.startswith("after.")} == {*before, "figures", "parameters"}
    shape = read_family(results / model_of(case))
    assert int(found["parameters"]) == max(map(sum, parameters_of(*shape, LAYOUTS[case][1])))
    for name, one in before.items():
        if name != "optimizer.rng":  # each has its own
            assert found[name].dtype == one.dtype
            assert torch.allclose(found[name], one, rtol=1e-5, atol=1e-5), name


def state_of(results, case, of_torch):
    """Tensors of the checkpoint of a case."""
    return of_torch if case == "torch" else load_file(results / f"{case}.safetensors")


@pytest.mark.parametrize("case", LAYOUTS_TESTED)
def test_a_checkpoint_goes_on_in_another_layout_and_in_the_torch_trainer(results, expected, case):
    figures, before, after, begun = expected[model_of(case)]
    source = state_of(results, SOURCES[case], before)
    found = load_file(results / f"resumed-{case}.safetensors")
    for name in before:
        if name != "optimizer.rng":
            assert torch.equal(found[name], source[name]), name
    assert_close(found, figures[SAVED_AT], after, begun)

    trainer = opened(results, model_of(case))
    trainer.load(results / f"state-{case}")
    metrics = trainer.step(trained_rows(case, SAVED_AT), objective(SAVED_AT))
    there = {f"after.{name}": one for name, one in copies(trainer).items()}
    there["figures"] = torch.tensor([metrics[name] for name in FIGURES], dtype=torch.float64)
    assert_close(there, figures[SAVED_AT], after, begun)


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_rounds_as_the_torch_trainer_does_and_keeps_exact_masters(results, expected, case):
    trainer, figures = opened(results, model_of(case), dtype="bfloat16"), []
    for step in range(SAVED_AT + 1):
        metrics = trainer.step(rows_of(step), objective(step))
        figures.append([metrics[name] for name in FIGURES])
    found, after = load_file(results / f"{case}.safetensors"), copies(trainer)

    wanted = torch.tensor(figures, dtype=torch.float64)
    assert torch.allclose(found["figures"][..., :4], wanted[..., :4], rtol=2e-2, atol=4e-3)  # bfloat16 has 8 bits
    for name, one in after.items():
        published, master = found[f"after.{name}"], found[f"master.{name}"]
        assert (published.dtype, master.dtype) == (one.dtype, torch.float32)
        assert torch.equal(published, master.bfloat16()), name
        assert not torch.equal(published.float(), master), name

    source = state_of(results, SOURCES[case], expected[model_of(case)][1])
    resumed = load_file(results / f"resumed-{case}.safetensors")
    trainer.load(results / f"state-{case}")
    for name, one in state(trainer).items():
        if name != "optimizer.rng":
            assert torch.equal(found[name], one), name
            rounded = torch.bfloat16 if name.startswith("reference.") else one.dtype  # the reference has no masters
            assert torch.equal(resumed[name].to(rounded), source[name].to(rounded)), name


@pytest.mark.parametrize("case", WITH_ROLES)
def test_a_critic_and_several_tokens_of_a_teacher_are_those_of_the_torch_trainer(results, expected, case):
    further = {"teacher": results / "qwen2", "critic": results / "llama"}
    trainer = opened(results, FIRST, **further)
    figures = [trainer.step(roles_rows(step), roles_objective(step)) for step in range(ROLES_SAVED_AT + 1)]
    found, after, begun = json.loads((results / f"roles-{case}.json").read_text()), copies(trainer), expected[FIRST][3]

    for one, wanted in zip(found, figures, strict=True):
        one.pop("restore_s", None)  # of the trainer that rests between steps
        assert one.keys() == wanted.keys()
        assert {"value_loss", "value_grad_norm", "explained_variance"} <= one.keys()
        for name, value in wanted.items():
            assert one[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert_moved_alike(load_file(results / f"roles-{case}.safetensors"), after, begun)
    assert "value_loss" in figures[0] and "grad_norm" not in figures[0]

    resumed = opened(results, FIRST, **further)
    resumed.load(results / f"roles-{case}")
    resumed.step(roles_rows(ROLES_SAVED_AT), roles_objective(ROLES_SAVED_AT))
    assert_moved_alike(copies(resumed), after, begun)
