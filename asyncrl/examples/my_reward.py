"""An example of a user's reward function: the share of letters at the right position.

A config names it, and the rows it grades, with paths relative to the config:

    [task]
    source = "questions.jsonl"

    [reward]
    function = "my_reward.py:reward"
"""


# Name the arguments that you need: completion, prompt, label, metadata, trajectory_id. An `async def` function also
# works; then many calls run at once. The function runs in a separate process. It may print (to the log), raise (this
# trajectory is dropped and the reason shown) or hang (the process is replaced after `time_limit_s`).
def reward(completion: str, label: str) -> dict[str, float]:
    """Return a number, or a dict with "reward" and more numbers; `trajectory.graded` carries all of them."""
    answer = completion.strip()
    right = sum(given == wanted for given, wanted in zip(answer, label, strict=False))
    return {
        "reward": right / max(len(answer), len(label)),  # an answer that is too long or too short loses reward too
        "solved": float(answer == label),
    }
