"""The goals for the figures."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """A bound of one figure."""

    bound: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Return whether a figure reaches the bound."""
        return value <= self.bound if self.at_most else value >= self.bound

    def text(self) -> str:
        """`>= 0.8`."""
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


_BUS = {
    "typed_prompt_share_of_bare": Goal(0.80),
    "typed_trajectory_share_of_bare": Goal(0.80),
    "stored_1_kib_per_s": Goal(15_000),
    "stored_trajectories_per_s": Goal(1_500),
    "encode_trajectory_us": Goal(10, at_most=True),
    "decode_trajectory_us": Goal(10, at_most=True),
}
_SCHEDULE = {
    "mean_10_ms_share_of_ideal": Goal(0.60),
    "mean_100_ms_share_of_ideal": Goal(0.90),
    "mean_1000_ms_share_of_ideal": Goal(0.97),
    "mean_10000_ms_share_of_ideal": Goal(0.97),
}
_ENGINE = {
    **{
        f"in_process_{running}_to_transformers_ratio": Goal(bound)
        for running, bound in ((16, 1.1), (64, 1.4), (256, 1.6))
    },
    **{f"http_{running}_to_in_process_ratio": Goal(0.85) for running in (16, 64, 256)},
    "trained_weights_logprob_max_abs_diff_nats": Goal(1e-4, at_most=True),
    **{
        f"{batch}_engine_to_transformers_ratio": Goal(0.8)
        for batch in ("1_prompts_of_1", "8_prompts_of_1", "64_prompts_of_1", "8_prompts_of_8")
    },
}
_RECOVERY = {
    name: Goal(bound, at_most=True)
    for name, bound in {
        "prompter_s": 3,
        "buffer_s": 3,
        "learner_s": 15,
        "engine_s": 12,
        "engine_server_s": 12,
        "nats_s": 3,
        "beyond_lease_s": 2,
    }.items()
}
_PUBLICATION = {
    f"{shape}_{figure}": Goal(bound, at_most=True)
    for shape, still, announced in (("0_6b", 0.2, 1.5), ("4b", 0.6, 6))
    for figure, bound in (
        ("publication_standstill_s", still),
        ("checkpoint_standstill_s", still),
        ("publication_announced_s", announced),
    )
}
_WEIGHTS = {"files_loaded_s": Goal(1.5, at_most=True), "stream_one_reader_mb_per_s": Goal(300)}
_ROLLOUTS = {
    f"{name}_{count}_of_{beside}": Goal(bound)
    for count in (16, 64, 256, 1024)
    for name, beside, bound in (("share", "bare", 0.98), ("routed", "unrouted", 0.97))
}
_TURNS = {
    "switches_s": Goal(5, at_most=True),
    "left_gib": Goal(3, at_most=True),
    **{f"{way}_over_pinned": Goal(0.7) for way in ("restore", "offload")},
}
_RESCORING = {"crossed_over_still": Goal(2, at_most=True)}
_LEARNER = {
    **{f"tiny_{rows}_share_of_bare": Goal(0.95) for rows in ("even", "mixed")},
    **{
        f"{shape}_{figure}": goal
        for shape in ("0_6b", "4b")
        for rows in ("even", "mixed")
        for figure, goal in (
            (f"{rows}_share_of_bare", Goal(0.97)),
            (f"asyncrl_{rows}_first_step_s", Goal(60, at_most=True)),
            (f"{rows}_2_ranks_over_one", Goal(1.9)),
            (f"asyncrl_{rows}_peak_gib", Goal(75, at_most=True)),
        )
    },
    "4b_asyncrl_even_mfu": Goal(0.60),
    "4b_asyncrl_mixed_mfu": Goal(0.55),
    "0_6b_asyncrl_even_mfu": Goal(0.40),
    "0_6b_asyncrl_mixed_mfu": Goal(0.40),
}
_MEGATRON = {
    "4b_one_even_mfu": Goal(0.55),
    "4b_even_one_over_bare": Goal(0.97),
    "4b_even_data_over_one": Goal(1.95),
    "4b_even_tensor_over_one": Goal(1.7),
    "4b_even_pipeline_over_one": Goal(1.6),
    "4b_even_context_over_one": Goal(1.6),
    "30b_a3b_one_even_mfu": Goal(0.25),
    "30b_a3b_even_one_over_bare": Goal(0.97),
    "30b_a3b_even_one_over_looped": Goal(3.0),
    "30b_a3b_even_replayed_over_one": Goal(0.97),
    "30b_a3b_even_expert_over_one": Goal(1.7),
    **{f"4b_{case}_export_gb_per_s": Goal(15) for case in ("one", "data", "tensor", "pipeline", "context")},
}
_FLEET = {
    **{f"{name}_share_of_most": Goal(0.9) for name in ("one", "four", "one_again")},
    **{name: Goal(0, at_most=True) for name in ("failed", "doubled")},
    "joined_first_token_after_up_s": Goal(2, at_most=True),
}
_RAY = {
    "ray_over_local": Goal(0.9),
    "ray_reward_last_5_steps": Goal(0.9),
    "joined_node_samples_s": Goal(15, at_most=True),
    **{name: Goal(0, at_most=True) for name in ("lost", "twice", "other_violations")},
}
_GATEWAY = {
    "added_first_token_p50_ms": Goal(5, at_most=True),
    "added_first_token_p99_ms": Goal(15, at_most=True),
    "turn_100_over_turn_2": Goal(2, at_most=True),
}
_LIVE = {
    "trained_updates": Goal(10),
    **{f"trained_{name}": Goal(0, at_most=True) for name in ("not_2xx", "broken_streams")},
    "trained_longest_silence_ms": Goal(250, at_most=True),
    **{f"{name}_p99_over_still": Goal(1.1, at_most=True) for name in ("first_token", "whole")},
}
_SESSIONS = {
    f"{update}_{name}": goal
    for update, silence_s in (("in_place", 0.3), ("resume", 1.0))
    for name, goal in (
        ("gateway_failed", Goal(0, at_most=True)),
        ("gateway_longest_silence_s", Goal(silence_s, at_most=True)),
        ("share_of_straight", Goal(0.95)),
    )
}
_SINKS = {
    "sinks_cost_share_upper": Goal(0.02, at_most=True),
    "scrape_bytes": Goal(300_000, at_most=True),
    "scrape_s": Goal(0.05, at_most=True),
}
_COST = {"progress_cost_share": Goal(0.03, at_most=True)}
_HISTORY = {
    "audit_memory_mb": Goal(2000, at_most=True),
    **{f"{role}_start_s": Goal(5, at_most=True) for role in ("prompter", "buffer", "learner", "supervisor")},
    **{f"{role}_memory_mb": Goal(300, at_most=True) for role in ("prompter", "buffer", "learner", "supervisor")},
}
_LOOP = {
    "share_of_ideal": Goal(0.92),
    "share_of_simulated": Goal(0.95),
    "share_of_simulated_gain": Goal(0.95),
    "wasted_share": Goal(0.05, at_most=True),
}
_IDLE = {"idle_cpu_percent_of_a_core": Goal(3, at_most=True)}


_SESSION = {
    "call_of_4096_tokens_cpu_ms": Goal(3, at_most=True),
    "call_of_65536_tokens_cpu_ms": Goal(10, at_most=True),
    "idle_cpu_percent_of_a_core": Goal(2, at_most=True),
    "memory_of_an_idle_session_kb": Goal(100, at_most=True),
}
_SANDBOX = {"starts_per_s": Goal(60), "exec_median_ms": Goal(3, at_most=True)}


def goals_of(name: str, *, short: bool = False) -> dict[str, Goal]:
    """Return the goals of a measurement by name of the figure."""
    if name == "pipeline":
        return {"trajectories_per_s": Goal(600 if short else 500)}
    goals = {
        "engine": _ENGINE,
        "bus": _BUS,
        "schedule": _SCHEDULE,
        "idle": _IDLE,
        "publication": _PUBLICATION,
        "weights": _WEIGHTS,
        "rescoring": _RESCORING,
        "rollouts": _ROLLOUTS,
        "learner": _LEARNER,
        "megatron": _MEGATRON,
        "turns": _TURNS,
        "fleet": _FLEET,
        "loop": _LOOP,
        "ray": _RAY,
        "cost": _COST,
        "sinks": _SINKS,
        "recovery": _RECOVERY,
        "history": _HISTORY,
        "sandbox": _SANDBOX,
        "preparation": {"slots_busy_share": Goal(0.95)},
        "gateway": _GATEWAY,
        "live": _LIVE,
        "sessions": _SESSIONS,
        "session": _SESSION,
    }
    return goals.get(name, {})
