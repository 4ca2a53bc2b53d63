"""All APIs of the gateway, by their names."""

from __future__ import annotations

from asyncrl.live.apis.chat import ChatCompletions
from asyncrl.live.apis.completions import Completions
from asyncrl.live.apis.messages import Messages
from asyncrl.live.apis.responses import Responses
from asyncrl.live.apis.schema import Api

MESSAGES = Messages()

APIS: dict[str, Api] = {
    "chat": ChatCompletions(),
    "responses": Responses(),
    "messages": MESSAGES,
    "completions": Completions(),
}
