"""`kvferry.vllm._siblings`: requests with `n` > 1."""

from __future__ import annotations

from kvferry.vllm import _siblings
from kvferry.vllm._siblings import Siblings


def test_only_the_first_answer_of_a_request_is_handed_over() -> None:
    siblings = Siblings()
    assert [siblings.owns(f"{n}_cmpl-a-0-1234") for n in (0, 1, 2)] == [True, False, False]
    assert [siblings.owns(f"{n}_cmpl-b-0-5678") for n in (1, 0)] == [True, False]
    assert siblings.owns("0_cmpl-a-0-1234"), "asked again"


def test_requests_with_one_answer_are_all_handed_over() -> None:
    siblings = Siblings()
    params = {"transfer_id": "a"}
    for request in ("cmpl-a-0-1", "cmpl-a-1-2", "chatcmpl-7_b", "7", "_a", ""):
        assert siblings.owns(request)
        assert siblings.ended(request, params) is params
        assert siblings.ended(request, None) is None


def test_all_answers_end_with_the_owners_parameters() -> None:
    siblings = Siblings()
    params = {"transfer_id": "a"}
    assert siblings.owns("0_r")
    assert not siblings.owns("1_r")
    assert siblings.ended("1_r", None) is None, "the owner has not ended; its own end comes last"
    assert siblings.ended("0_r", params) is params
    assert siblings.ended("1_r", None) is params


def test_what_is_remembered_is_bounded() -> None:
    siblings = Siblings()
    for number in range(3 * _siblings.KEPT):
        siblings.owns(f"0_{number}")
        siblings.ended(f"0_{number}", {"transfer_id": "a"})
    assert len(siblings._owners) == len(siblings._params) == _siblings.KEPT
