"""Tokens that rows have in common are computed once, and count for each row."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.training.attention import document_attention, gathered
from asyncrl.training.init_model import create_model
from asyncrl.training.packing import fed, packed, visible_keys
from asyncrl.training.passes import Passes
from asyncrl.training.policy import Loading, load_policy
from asyncrl.training.prefix_tree import prefix_tree, subtrees
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.mixtures import MIXTURE, routed_rows, write_transformers_model
from harness.roles import ALPHABET, SHAPE, TO_REFERENCE, TO_TEACHER, scored
from harness.training import FIRST, copies, policy, policy_rows
from topics.batches import CriticStep, Distillation, Objective

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose context holds the odd rows."""
    folder = tmp_path_factory.mktemp("model")
    create_model(folder, alphabet=ALPHABET, seed=0, shape=dataclasses.replace(SHAPE, context=64))
    return folder


def odd_rows():
    """Equal rows, rows that begin others, branches within answers, one-token answers, and rows that share nothing."""
    rng = np.random.default_rng(3)
    prompt, answer, other = (rng.integers(FIRST, FIRST + 26, size) for size in (30, 25, 40))
    texts = [
        [*prompt, *answer],
        [*prompt, *answer],
        [*prompt, *answer[:20], *answer[:9]],
        [*prompt, *answer[:20]],
        [*prompt, *answer[::-1]],
        [*prompt[:18], *other],
        [*prompt, FIRST],
        [*other[:5], *prompt],
        [*other],
        [*other, FIRST, FIRST],
        [*prompt[:10], FIRST],
    ]
    rows = policy_rows(rng, len(texts))
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        size, first = len(text), len(text) - 1 if number in (6, 10) else min(30, len(text) - 5)
        mask = (np.arange(size) >= first).astype(np.uint8)
        rows[number] = dataclasses.replace(
            row,
            tokens=np.array(text, np.int32),
            mask=mask,
            logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.full(size, row.advantages[0], np.float32),
            weights=np.full(size, 0.01, np.float32),
        )
    return rows


def test_each_scored_token_follows_the_tokens_of_its_row():
    rows = odd_rows()

    inputs = packed(rows, CPU, shared=True)

    documents, places = inputs.documents, inputs.positions.tolist()
    assert inputs.tokens.shape[1] < 0.6 * sum(len(row.tokens) for row in rows)
    starts = np.cumsum([0, *(count * length for count, length in documents.groups)])
    for row in rows:
        for end in np.flatnonzero(row.mask):
            place = places.pop(0)
            group = int(np.searchsorted(starts, place, "right")) - 1
            length = documents.groups[group][1]
            first = starts[group] + (place - starts[group]) // length * length
            seen = [range(starts[one], starts[one + 1]) for one in documents.seen[group]]
            fed = [int(inputs.tokens[0, at]) for part in (*seen, range(first, place + 1)) for at in part]
            assert fed == row.tokens[:end].tolist()
            assert documents.positions[0, place] == end - 1
    assert not places


@pytest.mark.parametrize("window", [None, 7])
def test_a_token_attends_to_its_row_as_if_rows_were_apart(window):
    rows = odd_rows()
    tree, apart = packed(rows, CPU, shared=True), packed(rows, CPU)
    torch.manual_seed(0)
    table = torch.randn(100, 60, 8 * 8, dtype=torch.float64, requires_grad=True)  # of a token at a place

    def attended(inputs):
        heads = table[inputs.documents.positions[0], inputs.tokens[0]].unflatten(1, (8, 8)).transpose(0, 1)[None]
        query, key, value = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        found, _ = document_attention(None, query, key, value, None, documents=inputs.documents, sliding_window=window)
        found = found[0, inputs.positions]
        return found, torch.autograd.grad(found.square().sum(), table)[0]

    for one, other in zip(attended(tree), attended(apart), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_keys_that_are_gathered_for_each_document_have_the_gradient_of_separate_rows():
    tree = prefix_tree(fed(odd_rows()))
    visible = visible_keys(tree.groups, tree.seen, CPU)
    torch.manual_seed(0)
    own = torch.randn(3, tree.size, 2, 8, dtype=torch.float64, requires_grad=True)  # queries, keys and values
    lengths = [length for count, length in tree.groups for _ in range(count)]
    kept = visible.places, visible.order, visible.uses

    def attended(keys):
        found, ends = [], [0, *np.cumsum(lengths)]
        for (first, end), (start, last) in zip(pairwise(ends), pairwise(visible.runs.ends.tolist()), strict=True):
            heads = own[0, first:end], keys[0][start:last], keys[1][start:last]
            mask = torch.ones(end - first, last - start, dtype=torch.bool).tril(last - start - end + first)
            found.append(scaled_dot_product_attention(*(one.transpose(0, 1) for one in heads), mask).transpose(0, 1))
        return torch.cat(found)

    sums = []
    for keys in ([gathered(one, *kept) for one in own[1:]], [one[visible.places] for one in own[1:]]):
        found = attended(keys)
        sums.append((found, torch.autograd.grad(found.square().sum(), own)[0]))

    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    rounded = own.detach().bfloat16().requires_grad_()
    gradient = torch.autograd.grad(gathered(rounded[1], *kept).sum(), rounded)[0]
    assert gradient.dtype == torch.bfloat16
    assert (gradient[1].float() == visible.uses[:, None, None]).all()
    uses = np.zeros(tree.size, np.int64)
    for places, row in zip(tree.places, fed(odd_rows()), strict=True):
        assert len(places) == len(row)
        np.add.at(uses, places, 1)
    assert (uses >= 1).all()


@pytest.mark.parametrize("recompute", [False, True])
def test_each_tensor_has_the_gradient_of_separate_rows_in_float64(model, recompute):
    how = Loading(CPU, torch.float32, compiled=False, recompute=recompute)
    gradients = []
    for shared in (False, True):
        loaded = load_policy(model, how).double()
        for name, module in list(loaded.model.named_modules()):
            if "norm" in type(module).__name__.lower():  # which transformers computes in float32
                exact = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
                exact.weight = module.weight
                loaded.model.set_submodule(name, exact)
        inputs = packed(odd_rows(), CPU, shared=shared)
        hidden = loaded.chosen(inputs.tokens, inputs.positions, inputs.documents)
        logprobs = loaded.model.get_output_embeddings()(hidden).log_softmax(-1)
        (logprobs.gather(1, inputs.targets[:, None])[:, 0] * torch.linspace(-1, 2, len(hidden))).sum().backward()
        gradients.append({name: one.grad for name, one in loaded.model.named_parameters()})

    for name, apart in gradients[0].items():
        difference = (gradients[1][name] - apart).abs().max()
        assert 0 < apart.abs().max() < torch.inf
        assert difference <= 1e-10 * apart.abs().max(), name


@pytest.mark.parametrize(
    "settings",
    [{}, {"recompute": True}, {"micro_batch_tokens": 70}, {"dtype": "bfloat16"}],
    ids=["plain", "recompute", "small passes", "bfloat16"],
)
def test_a_step_with_shared_prefixes_is_that_of_separate_rows(model, settings):
    rows = odd_rows()
    trainers = [TorchTrainer(model, TorchSettings(share_prefixes=one, **settings)) for one in (False, True)]
    within = 2e-2 if "dtype" in settings else 1e-5
    separate = sum(len(row.tokens) - 1 for row in rows if row.advantages.any())

    for _ in range(3):
        apart, shared = (trainer.step(rows, policy()) for trainer in trainers)
        assert shared["loss"] == pytest.approx(apart["loss"], abs=0.1 * within)
        assert (apart["tree_ratio"], apart["tokens_computed"]) == (1.0, separate)
        assert shared["tree_ratio"] == shared["tokens_computed"] / separate < 1.0
        assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=within)
    of_apart, of_shared = (
        torch.cat([one.float().flatten() for one in copies(trainer).values()]) for trainer in trainers
    )
    assert (of_apart - of_shared).norm() <= 10 * within * of_apart.norm()


def test_every_model_of_a_trainer_shares_prefixes(models, tmp_path):
    for name in ("policy", "teacher"):
        shape = dataclasses.replace(SHAPE, context=64, hidden=48 if name == "teacher" else 32)
        create_model(tmp_path / name, alphabet=ALPHABET, seed=len(name), shape=shape)
    given = {"teacher": tmp_path / "teacher", "critic": tmp_path / "policy"}
    trainers = [TorchTrainer(tmp_path / "policy", TorchSettings(share_prefixes=one, **given)) for one in (False, True)]
    objective = Objective(
        learning_rate=1e-2,
        penalties=[TO_REFERENCE, TO_TEACHER],
        loss_options={"proximal": "recomputed"},
        critic=CriticStep(learning_rate=1e-2),
    )
    rows = [dataclasses.replace(row, estimator="gae") for row in odd_rows()]

    for step in (objective, objective, Objective(learning_rate=1e-2, distillation=Distillation(5, 1.0, "both"))):
        apart, shared = (trainer.step(rows, step) for trainer in trainers)
        assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-5)
        assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-4)
    for column in ("proximal", "reference", "teacher", "values"):
        apart, shared = (scored(trainer, rows, column) for trainer in trainers)
        np.testing.assert_allclose(shared, apart, atol=1e-4)


def test_tokens_share_a_place_only_where_they_go_to_the_same_experts(tmp_path):
    write_transformers_model(tmp_path, "qwen3_moe", MIXTURE)
    rows = [dataclasses.replace(row, tokens=row.tokens % 60) for row in odd_rows() if len(row.tokens) < 60]
    plain, replayed = routed_rows(rows[:1], 0)[0], [dataclasses.replace(row) for row in rows]
    for number, row in enumerate(rows[:5]):  # rows of one prompt, whose first 20 tokens have the same experts
        found = routed_rows([row], number + 1)[0].routing
        found[:20] = plain.routing[:20]
        replayed[number] = dataclasses.replace(row, routing=found, routed=found.any(1))
    settings = {"replays": True, "micro_batch_tokens": 10_000}
    trainers = [TorchTrainer(tmp_path, TorchSettings(share_prefixes=one, **settings)) for one in (False, True)]

    laid = packed(replayed, CPU, shared=True)
    assert packed(rows, CPU, shared=True).tokens.shape[1] < laid.tokens.shape[1]
    assert laid.tokens.shape[1] <= packed(replayed, CPU).tokens.shape[1] - 4 * 20
    for _ in range(2):
        apart, shared = (trainer.step(replayed, policy()) for trainer in trainers)
        assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-4)


def test_experts_of_the_pass_before_the_update_are_those_of_each_row(tmp_path):
    write_transformers_model(tmp_path, "qwen3_moe", MIXTURE)
    rows = [dataclasses.replace(row, tokens=row.tokens % 60) for row in odd_rows()]
    taken = []
    for shared in (False, True):
        trainer = TorchTrainer(tmp_path, TorchSettings(share_prefixes=shared, records=True))
        filled = trainer._filled(rows, ["proximal"])
        taken.append(np.concatenate([row.routing[:-1] for row in filled]))
        assert packed(filled, CPU, shared=True).tokens.shape[1] == packed(rows, CPU, shared=True).tokens.shape[1]

    assert np.array_equal(*taken)


def test_rows_of_a_prompt_stay_in_one_pass_as_far_as_it_holds_them():
    rows = odd_rows()
    for budget in (60, 100, 1000):
        cut = Passes(CPU, micro_batch_tokens=budget, shared=True).cut(rows)

        assert sorted(id(row) for batch in cut for row in batch) == sorted(map(id, rows))
        sizes = [packed(batch, CPU, shared=True).tokens.shape[1] for batch in cut]
        assert all(size <= budget or len(batch) == 1 for size, batch in zip(sizes, cut, strict=True))
    assert len(cut) == 1


def test_the_turns_of_a_session_are_computed_once():
    rng = np.random.default_rng(0)
    history, rows = rng.integers(3, 900, 60), []
    for _ in range(20):  # an answer, and the user's next message
        rows.append(np.concatenate((history, rng.integers(3, 900, 30))).astype(np.int32))
        history = np.concatenate((rows[-1], rng.integers(3, 900, 20)))
    distinct = len(rows[-1])

    for budget in (100, 16384):
        found = subtrees(prefix_tree([rows[number] for number in rng.permutation(20)]), budget)

        assert sum(size for _, size in found) <= 1.1 * distinct
    assert sum(map(len, rows)) > 9 * distinct


def test_a_large_tree_is_cut_where_the_fewest_tokens_are_repeated():
    rng = np.random.default_rng(0)
    system, rows = rng.integers(3, 900, 30), []
    for _ in range(6):
        prompt = np.concatenate((system, rng.integers(3, 900, 200)))
        rows += [np.concatenate((prompt, rng.integers(3, 900, 50))).astype(np.int32) for _ in range(8)]
    tree = prefix_tree([rows[number] for number in rng.permutation(48)])

    found = subtrees(tree, 1300)  # two groups, and some answers of a third

    assert sorted(number for numbers, _ in found for number in numbers) == list(range(48))
    assert all(size <= 1300 for _, size in found)
    assert sum(size for _, size in found) <= 1.02 * tree.size


def test_a_model_with_recurrent_state_computes_each_row(model):
    loaded = load_policy(model, Loading(CPU, torch.float32, compiled=False))
    assert loaded.arrangement.shares


def test_a_step_on_a_session_computes_each_token_once(tmp_path):
    create_model(tmp_path, alphabet=ALPHABET, seed=0, shape=dataclasses.replace(SHAPE, context=640))
    rng, rows = np.random.default_rng(0), []
    history = rng.integers(FIRST, FIRST + 26, 30)
    for number, row in enumerate(policy_rows(rng, 20)):
        tokens = np.concatenate((history, rng.integers(FIRST, FIRST + 26, 16))).astype(np.int32)
        mask = (np.arange(len(tokens)) >= len(history)).astype(np.uint8)
        given = {"trajectory_id": f"l{number:06d}-0", "tokens": tokens, "mask": mask}
        given |= {
            name: np.full(len(tokens), value, np.float32) for name, value in (("advantages", 0.5), ("weights", 0.01))
        }
        versions, logprobs = np.where(mask, 0, -1).astype(np.int32), np.where(mask, -3.0, 0.0).astype(np.float32)
        rows.append(dataclasses.replace(row, versions=versions, logprobs=logprobs, **given))
        history = np.concatenate((tokens, rng.integers(FIRST, FIRST + 26, 8)))
    trainers = [TorchTrainer(tmp_path, TorchSettings(share_prefixes=one)) for one in (False, True)]

    apart, shared = (trainer.step(rows, policy()) for trainer in trainers)

    assert shared["tokens_computed"] <= 1.1 * len(rows[-1].tokens)
    assert apart["tokens_computed"] > 9 * shared["tokens_computed"]
    assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
