"""Options of objectives, and settings of the further models, that have no effect or cannot hold together."""

from pathlib import Path

import pytest

from asyncrl.config.check import contradictions
from asyncrl.errors import LaunchError
from asyncrl.run.resume import MAY_CHANGE, longer
from harness.configs import from_settings, the_problem


def test_an_option_of_another_loss_is_refused_with_those_that_there_are():
    problem = the_problem("demo", "learner.loss=reinforce", "learner.loss_options.clip_low=0.1")

    assert problem.message == (
        'loss "reinforce" has no option "clip_low", its options are masks, sequence_floor, sequence_cap, '
        "second_moment_cap, opsm_cap, max_in_queue_lag, max_in_flight_lag, kl, kl_estimator, kl_unbiased, "
        "entropy, observations, ratio_cap"
    )


def test_an_option_without_effect_is_refused():
    problem = the_problem("demo", "learner.loss_options.clip_low=0.1")

    assert problem.message == (
        'it has no effect with the other options of loss "decoupled"; remove it, or set what uses it'
    )


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["learner.loss_options.correction_floor=3"], "correction_floor", "is above correction_cap; lower it"),
        (
            ["learner.loss_options.masks=['geometric']", "learner.loss_options.sequence_floor=3"],
            "sequence_floor",
            "is above sequence_cap",
        ),
        (["learner.critic.lr=1"], "learner.critic.lr", 'there is a critic where an advantage is "gae"'),
        (["learner.critic.betas=[1.0, 0.9]", "learner.advantage=gae"], "critic.betas", "two numbers below 1"),
        (["learner.reference.refresh_every=4"], "refresh_every", "no loss and no penalty needs a reference"),
        (["learner.teacher.kl_estimator=k2"], "kl_estimator", "learner.teacher.model names none"),
        (["learner.teacher.top_k=8"], "top_k", "learner.teacher.model names none"),
        (["learner.teacher.model=m", "learner.teacher.direction=both"], "teacher.direction", "teacher.top_k is 0"),
        (
            ["learner.teacher.model=m", "learner.teacher.top_k=8", "learner.teacher.kl_of=trainer"],
            "teacher.kl_of",
            "the KL over the top_k tokens is no estimate",
        ),
        (
            ["learner.teacher.url=http://h:1", "learner.teacher.model=m"],
            "teacher.model",
            "are two teachers; leave one out",
        ),
        (["learner.teacher.url=h:1"], "learner.teacher.url", 'found "h:1", expected http://host:port'),
        (
            ["learner.teacher.url=http://h:1", "rollout.temperature=0.7"],
            "rollout.temperature",
            "servers give log-probs of a prompt at temperature 1; set rollout.temperature = 1",
        ),
        (["learner.teacher.model=m", "learner.teacher.in_flight=2"], "in_flight", "learner.teacher.url names none"),
        (
            ["learner.teacher.url=http://h:1", "learner.teacher.deadline_s=60"],
            "learner.teacher.deadline_s",
            "one answer may take 120 s, and all together 60 s; raise it",
        ),
        (["learner.lora.alpha=8"], "learner.lora.alpha", "learner.lora.rank is 0"),
        (["learner.lora.publish=adapter"], "learner.lora.publish", "learner.lora.rank is 0"),
        (
            ["learner.lora.rank=4", "learner.lora.publish=adapter", "weights.delta=auto"],
            "weights.delta",
            'found "auto": adapters are published whole, as small as a difference; set "never"',
        ),
        (
            ["learner.lora.rank=4", "learner.lora.publish=adapter", "weights.transport=ipc"],
            "weights.transport",
            "adapters go only through the store",
        ),
        (["engine.adapters=served"], "engine.adapters", "no adapters are published"),
        (
            ["learner.lora.rank=4", "learner.lora.publish=adapter", "engine.adapters=served"],
            "engine.adapters",
            'servers of kind "embedded" do not; set "merged"',
        ),
        (
            [
                *("learner.lora.rank=4", "learner.lora.publish=adapter", "engine.adapters=served"),
                *("engine.kind=sglang", "weights.update=in_place"),
            ],
            "engine.adapters",
            "requests would continue with the adapter before",
        ),
        (
            [
                *("learner.lora.rank=4", "learner.lora.publish=adapter", "engine.adapters=served"),
                *("engine.kind=sglang", "learner.lora.targets=['q_proj', 'k_proj']"),
            ],
            "engine.adapters",
            "has some of q_proj, k_proj, v_proj, and not q_proj and v_proj",
        ),
        (
            [
                *("learner.lora.rank=4", "learner.lora.publish=adapter", "engine.adapters=served"),
                *("engine.kind=sglang", "learner.lora.targets=['up_proj']"),
            ],
            "engine.adapters",
            "up_proj without gate_proj",
        ),
        (
            [
                *("learner.lora.rank=4", "learner.lora.publish=adapter", "engine.router.count=1"),
                'engine.groups.a={kind="sglang", adapters="served"}',
                'engine.groups.b={kind="sglang"}',
            ],
            "engine.groups.a.adapters",
            'a router sends requests to groups with adapters = "merged", too',
        ),
        (["learner.advantage=gdpo"], "learner.advantage", 'is empty, and the advantage "gdpo" needs the metrics'),
        (["learner.reward_weights={short=1.0}"], "reward_weights", 'no advantage is "gdpo"; leave it out'),
        (["learner.assertions.broken=stop"], "broken", "has no effect: no bound (k3, first_k3, first_kl) is set"),
        (["learner.assertions.first_kl=1e-6"], "first_kl", "has no effect: nothing is measured from a reference"),
        (
            ["learner.advantage=gae", "learner.critic.warmup_steps=130"],
            "critic.warmup_steps",
            "leaves none of 130 steps to the policy",
        ),
        (["learner.ranks=2", "learner.device=cuda:1"], "learner.device", "names one GPU for several ranks"),
        (
            ["learner.layout.tensor=2"],
            "learner.layout.tensor",
            'the trainer "torch" has only context; leave out tensor',
        ),
        (
            ["learner.trainer=megatron", "learner.layout.pipeline=2", "learner.layout.tensor=2", "learner.ranks=6"],
            "learner.layout.tensor",
            "found 6 ranks, expected a multiple of 4: tensor = 2 times pipeline = 2 ranks hold one model",
        ),
        (
            ["learner.trainer=megatron", "learner.layout.context=2", "learner.ranks=3"],
            "learner.layout.context",
            "found 3 ranks, expected a multiple of 2: context = 2 ranks hold one model",
        ),
        (
            ["learner.trainer=megatron", "learner.layout.pipeline=2", "learner.layout.expert=3", "learner.ranks=4"],
            "learner.layout.expert",
            "found expert times expert_tensor = 3, expected a divisor of the 2 ranks of a stage",
        ),
        (["learner.trainer=megatron", "learner.moments=bfloat16"], "learner.moments", "has no moments"),
        (["learner.trainer=megatron", "learner.activations=0.9"], "learner.activations", "has no activations"),
        (["learner.moments=bfloat16", "learner.betas=[0.9, 0.999]"], "learner.betas", "at most 0.99"),
        (
            ["learner.trainer=megatron", "learner.lora.rank=4", "learner.mtp_weight=0.1"],
            "learner.mtp_weight",
            "only adapters are trained; set 0",
        ),
        (["learner.trainer=megatron", "learner.exchange=step"], "learner.exchange", "has no exchange"),
        (
            ["learner.share_prefixes=true", "learner.trainer=megatron"],
            "learner.share_prefixes",
            'the trainer "megatron" has no share_prefixes',
        ),
        (["learner.mtp_weight=0.1"], "learner.mtp_weight", 'the trainer "torch" has no mtp_weight'),
        (["learner.dtype=fp8", "learner.device=cuda"], "learner.dtype", 'the trainer "torch" has no fp8'),
        (["learner.dtype=fp8", "learner.trainer=megatron"], "learner.dtype", 'found "fp8" with learner.device = "cpu"'),
        (["learner.router_bias_rate=0.001"], "learner.router_bias_rate", 'the trainer "torch" has no router_bias_rate'),
        (["rollout.seeded=true", "engine.kind=sglang"], "rollout.seeded", "--enable-deterministic-inference"),
    ],
)
def test_what_has_no_effect_or_the_wrong_one_is_refused(overrides, key, words):
    problem = the_problem("demo", *overrides)

    assert key in problem.key
    assert words in problem.message


def test_a_loss_that_needs_a_column_which_nothing_fills_is_refused(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from asyncrl import Loss\n\nclass Own(Loss, frozen=True):\n    needs = ('refrence',)\n"
    )
    (tmp_path / "run.toml").write_text('[learner]\nloss = "own.py:Own"\n')

    problem = the_problem(str(tmp_path / "run.toml"))

    assert 'needs the column "refrence", and nothing fills it' in problem.message


def test_batches_of_a_run_that_goes_on_may_become_larger_alone():
    plain = from_settings("buffer.batch_groups=8").config
    assert longer(plain, ["buffer.batch_groups=12"]).buffer.batch_groups == 12
    with pytest.raises(LaunchError, match=r"--set buffer.batch_groups=4: the run has 8; it may be raised, or lowered"):
        longer(plain, ["buffer.batch_groups=4"])
    rising = ["task.source=sum", "task.curriculum.option=digits", "task.curriculum.first=1", "task.curriculum.last=3"]
    with pytest.raises(LaunchError, match="the levels of the curriculum follow from it"):
        longer(from_settings(*rising).config, ["buffer.batch_groups=80"])


def test_a_run_that_goes_on_has_another_number_of_gateways_but_keeps_having_some_or_none():
    served = from_settings("gateway.count=2", "model.create.template={{ messages }}").config
    assert longer(served, ["gateway.count=1"]).gateway.count == 1
    with pytest.raises(LaunchError, match=r"--set gateway.count=0: the run began with 2; from or to 0 only in a fork"):
        longer(served, ["gateway.count=0"])


def test_a_run_that_goes_on_keeps_its_critic_and_the_options_of_the_filters_that_are_on():
    with_critic = from_settings("learner.advantage=gae").config
    with pytest.raises(LaunchError, match="has a critic, which unfinished batches still need"):
        longer(with_critic, ["learner.advantage=grpo"])
    plain = from_settings().config
    on = longer(plain, ["learner.filters=['pass_rate']", "learner.filter_options.pass_rate.below=0.75"])
    assert on.learner.filter_options.pass_rate.below == 0.75
    with pytest.raises(LaunchError, match="the filter is on, and groups were dropped by its options"):
        longer(on, ["learner.filter_options.pass_rate.below=0.5"])
    off = longer(on, ["learner.filters=[]", "learner.filter_options.pass_rate.below=1.0"])
    assert contradictions(off) == []


def test_all_settings_that_may_change_in_a_run_that_goes_on_are_listed():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "operate.md").read_text()
    section = page.partition("## Settings that may change")[2].partition("\n## ")[0]
    assert [key for key in MAY_CHANGE if f"`{key}`" not in section] == []
