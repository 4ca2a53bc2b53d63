"""NATS: connect, provision, publish, pull, fold, blobs, embedded server."""

from asyncrl.imports import absent

with absent("aiohttp"):  # for websockets, which are not used here: a quarter of what most processes would load
    import nats as nats
