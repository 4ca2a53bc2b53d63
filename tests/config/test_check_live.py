"""Settings of live traffic that cannot hold together, each found by the setting that is at fault."""

from typing import Any

import msgspec
import pytest

from asyncrl.config.check_live import live_contradictions
from asyncrl.config.settings import Config

JUDGED = {"kind": "rule", "function": "a.py:judge"}


@pytest.mark.parametrize(
    ("live", "learner", "keys"),
    [
        ({"method": "combine"}, {}, ""),
        ({"method": "distillation", "judge": {"kind": "rule"}}, {}, "live.method live.judge.function"),
        ({"method": "combine", "judge": {}}, {}, "live.method"),
        ({"method": "distillation", "hindsight": {"w_rl": 2.0}}, {}, "live.hindsight.w_rl live.method"),
        ({"method": "combine", "hindsight": {"wording": "do better"}}, {}, "live.hindsight.wording"),
        ({"hindsight": {"clip": 2.0}}, {}, "live.hindsight.clip"),
        ({"method": "combine"}, {"trainer": "megatron"}, "live.method learner.trainer"),
        ({"method": "combine"}, {"reference": {"refresh_every": 2}}, "learner.reference.refresh_every live.method"),
        ({"judge": {"kind": "endpoint", "url": "a:1", "model": "m"}}, {}, "live.judge.url"),
        ({"judge": {"kind": "endpoint", "url": "http://a:1/v1"}}, {}, "live.judge.model"),
        ({"judge": JUDGED | {"url": "http://a:1/v1"}}, {}, "live.judge.url live.judge.kind"),
        ({"safety": {"question": "shall i("}}, {}, "live.safety.question"),
        ({"safety": {"kl_bound": 0.5}}, {"trainer": "megatron"}, "live.safety.kl_bound"),
    ],
)
def test_what_cannot_hold_together_is_found_by_its_settings(live: dict[str, Any], learner: dict[str, Any], keys: str):
    tables = {"gateway": {"count": 1}, "live": {"fraction": 0.5, "judge": JUDGED} | live, "learner": learner}

    found = list(live_contradictions(msgspec.convert(tables, Config)))

    assert [" ".join(one.keys) for one in found] == [keys] * bool(keys)
