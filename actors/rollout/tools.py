"""Dependencies that all trajectories of a rollout worker share."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.rollout.opponent import Opponent
from actors.rollout.progress import Progress, ProgressLog, ProgressReader
from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.engines import open_fleet
from actors.runtime.isolation import Isolation
from asyncrl.bus.group_rows import GroupRows
from asyncrl.bus.routing import Cut, store_routing
from asyncrl.config.harness_settings import harness_name
from asyncrl.config.held_out import graded_tasks, held_out_sets
from asyncrl.config.tasks import turns_of
from asyncrl.data.model_dir import model_info
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.generator import Generator
from asyncrl.engine.request_options import RequestOptions
from asyncrl.harnesses.rollout import rollout_function
from asyncrl.live.hints import HintReader, HintWriter
from asyncrl.live.stored import TurnReader
from asyncrl.rollout.context import RolloutFunction
from asyncrl.sandboxes.pool import SandboxPool
from asyncrl.sinks.kinds import traced_share
from asyncrl.tools.server import Toolbox
from asyncrl.training.megatron.parallel_config import Layout
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import Segment, TrajectoryGenerated
from topics.wire import UInt8Array


class Tools:
    """The dependencies that all trajectories of a worker share."""

    def __init__(self, context: Context, isolation: Isolation) -> None:
        """
        Raises:
            ModelError, TokenizerError, FunctionError: the model or the rollout function cannot serve.
        """
        config, directory = context.config, context.files.model_path(context.config.model)
        model = model_info(directory)
        self.context = context
        self.isolation = isolation
        self.model_context = model.context  # tokens that the trained model takes
        self.served = model._replace(context=config.engine.context or model.context)  # the model as engines serve it
        self.tokenizer = TaskTokenizer.load(directory, skip_special=config.rollout.skip_special_tokens)
        self.toolbox = Toolbox(config.tools, context.files.base)
        self.sandboxes = SandboxPool(config.sandbox, context.vitals)
        context.sandbox_fault = lambda: self.sandboxes.fault
        self.functions: dict[str, RolloutFunction] = {}  # by task
        self.preparing: set[str] = set()  # tasks whose functions prepare a sandbox before they ask for a slot
        for name, task in graded_tasks(config).items():
            self.preparing |= {name} if harness_name(task.rollout) else set()
            self.functions[name] = rollout_function(
                task.rollout, context.files.base, config.harnesses, self.sandboxes.open
            )
        self.held_out = held_out_sets(config)
        self.fleet = open_fleet(context)
        # The loss with a worker is bounded, so tokens arrive in portions no larger than the bound.
        settings = config.rollout
        routed = config.learner.routing == "replay"
        manner = RequestOptions(settings.progress_limit, config.weights.update == "in_place", settings.seeded, routed)
        decode, counts = self.tokenizer.decode_all, context.vitals
        self.generator = Generator(self.fleet, self.served, decode, counts=counts, manner=manner)
        self.eval_fleet, manner = self.fleet, manner._replace(routed=False)  # answers to evaluations are not trained on
        if config.eval.engines:  # a trajectory that one version began is not continued by another version
            self.eval_fleet, manner = open_fleet(context), manner._replace(in_place=False)
        self.eval_generator = Generator(self.eval_fleet, self.served, decode, counts=counts, manner=manner)
        self.opponent = Opponent(context, self.tokenizer)
        self._layout = Layout(**msgspec.structs.asdict(config.learner.layout))
        self.rows = GroupRows(context.bus)
        self.turns = TurnReader(context.bus, routed=routed)
        self.hints = self._hint_reader(context)
        self.log = ProgressLog(context)
        self.reader = ProgressReader(context.bus, context.refuse)
        self.under_way: set[Progress] = set()
        self.traced_share = traced_share(config.metrics)

    def _hint_reader(self, context: Context) -> HintReader | None:
        live = context.config.live
        if not live.fraction or live.method == "binary":
            return None
        return HintReader(context.bus, HintWriter(self.tokenizer, live.hindsight.wording), context=self.model_context)

    def open_progress(self, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> Progress:
        """Return the progress of a trajectory, of which nothing is read yet."""
        return Progress(self.context, issued, delivery, self.log, self.reader)

    async def store_routing(self, result: TrajectoryGenerated, rows: list[UInt8Array]) -> None:
        """Store the experts of a result's tokens where the ranks of the learner find their own, and name them in it."""
        layout = self._layout
        cut = Cut(layout.bounds(self.served.layers), layout.context)
        result.routing = await store_routing(self.context.bus, result, rows, cut)

    async def close(self) -> None:
        """Stop the servers of tools, and destroy the sandboxes."""
        await self.toolbox.close()
        await self.sandboxes.close()

    def supervised(self, rows: list[PromptRow]) -> list[Segment]:
        """Each row becomes one or several segments: mask 1 on trained tokens, version -1, log-prob 0."""
        turns = turns_of(self.context.config.warmup)
        segments = []
        for row in rows:
            encoded = self.tokenizer.encode_supervised(row, turns, max_tokens=self.model_context)
            for tokens, mask in encoded:
                zeros = np.zeros(len(tokens), np.float32)
                segments.append(Segment(tokens, mask, zeros, np.full(len(tokens), -1, np.int32)))
        return segments
