"""API keys: valid from their fact on until they are revoked, known by digests alone."""

import pytest

from asyncrl.live.apis.schema import LiveError
from asyncrl.live.keys import Keys, digest_of, make_key
from topics.keys import KeyRevoked


@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
def test_a_key_names_its_tenant_until_it_is_revoked(header: str):
    keys, (key, added) = Keys(), make_key("anna")
    headers = {header: f"bearer {key}" if header == "Authorization" else key}
    keys.take(make_key("berta")[1])
    keys.take(added)

    assert keys.tenant(headers) == "anna"
    assert key not in repr(added) and added.digest == digest_of(key)
    keys.take(KeyRevoked(key_id=added.key_id))
    with pytest.raises(LiveError, match="not valid here"):
        keys.tenant(headers)
    assert [one.tenant for one in keys.valid.values()] == ["berta"]


def test_tenants_are_several_as_long_as_each_has_a_key():
    keys, ((_, first), (_, second), (_, other)) = Keys(), (make_key("anna"), make_key("anna"), make_key("ben"))
    for added in (first, second, first):
        keys.take(added)
        assert not keys.are_of_several()
    keys.take(other)
    assert keys.are_of_several()
    keys.take(KeyRevoked(key_id=first.key_id))
    assert keys.are_of_several()
    keys.take(KeyRevoked(key_id=second.key_id))
    assert not keys.are_of_several()


def test_an_end_holds_though_it_comes_first():
    keys, (key, added) = Keys(), make_key("anna")
    keys.take(KeyRevoked(key_id=added.key_id))
    keys.take(added)

    with pytest.raises(LiveError, match="not valid here") as caught:
        keys.tenant({"x-api-key": key})
    assert caught.value.fault == "key"


@pytest.mark.parametrize("headers", [{}, {"x-api-key": ""}, {"Authorization": "Bearer "}])
def test_a_request_without_a_key_is_told_how_to_send_one(headers: dict[str, str]):
    with pytest.raises(LiveError, match="has no API key; send x-api-key"):
        Keys().tenant(headers)
