"""How prompts begin: the target goes on from here in the user's place.

An instruction-tuned model that is given the opening of a user's turn writes that turn (Magpie, Xu et
al. 2024, arXiv:2406.08464). An empty lead leaves the kind of prompt to the model; the others steer it
to kinds of traffic that it would seldom choose. No lead is taken from a benchmark.
"""

from __future__ import annotations

import random

TOPICS = (
    "the history of the bicycle", "how vaccines work", "a lost dog", "the water cycle", "chess",
    "learning to play the piano", "a small bakery", "the moon landing", "sleep", "urban gardening",
    "the Roman army", "electric cars", "a football match", "coral reefs", "job interviews",
    "the stock market", "a flooded village", "volcanoes", "coffee", "a new phone", "whales",
    "the French Revolution", "saving money", "a bridge that collapsed", "jazz", "robots in hospitals",
    "a court case", "mountain climbing", "the printing press", "school uniforms", "bees", "tea",
    "a museum robbery", "space telescopes", "marathon training", "the Amazon river", "street food",
    "a politician who resigned", "solar power", "working from home", "a missing painting", "snow",
)  # fmt: skip

GERMAN = (
    "Der",
    "Die",
    "Das",
    "Wir",
    "Es ist",
    "In",
    "Nach",
    "Ich",
    "Man",
    "Im Jahr",
    "Viele",
    "Aber",
)

THINGS = (
    "apples", "books", "pencils", "tickets", "cookies", "stamps", "chairs", "miles", "dollars", "fish",
    "flowers", "shirts", "marbles", "eggs", "pages", "boxes", "hours", "pizzas", "trees", "cars",
)  # fmt: skip

NAMES = (
    "Anna", "Omar", "Mia", "Peter", "Lucy", "Sam", "Nina", "Carlos", "Ruth", "Ben", "Leah", "Tom",
    "Priya", "Jack", "Zoe", "Liam", "Kate", "Hugo", "Ivy", "Noah",
)  # fmt: skip

CODE = (
    "Complete the following Python function.\n\n```python\ndef ",
    "Write a Python function that ",
    "Write a Python function called ",
    "Complete this code:\n\n```python\nfrom typing import List\n\ndef ",
    "Fix the bug in this code:\n\n```python\n",
    "Write an SQL query that ",
    "Explain what this function does:\n\n```python\ndef ",
)

QUESTIONS = (
    "Who ",
    "When ",
    "Where ",
    "What is ",
    "How many ",
    "Why ",
    "Which ",
    "How do ",
    "What are ",
)

INSTRUCTIONS = (
    "Write a short story about ", "Give me a list of ", "Rewrite the following sentence ", "Explain ",
    "Write an email to ", "Classify ", "Suggest ", "Correct the grammar in the following text:\n\n",
    "Compare ", "Write a poem about ", "Make a table of ", "Give advice to ", "You are given ",
    "Describe ", "Create a plan for ", "Imagine you are ", "Compose a blog post about ", "Convert ",
    "Generate ", "Write a product description for ", "Identify ", "Edit the following paragraph ",
)  # fmt: skip

SHARES = {
    "free": 0.36, "instruction": 0.16, "math": 0.14, "code": 0.09, "question": 0.09,
    "summary": 0.06, "grounded": 0.05, "translation": 0.05,
}  # fmt: skip


def draw_lead(random: random.Random) -> tuple[str, str]:
    """(kind, opening of the user's turn)."""
    kind = random.choices(list(SHARES), weights=list(SHARES.values()))[0]
    if kind == "free":
        return kind, ""
    if kind == "instruction":
        return kind, random.choice(INSTRUCTIONS)
    if kind == "code":
        return kind, random.choice(CODE)
    if kind == "question":
        return kind, random.choice(QUESTIONS)
    if kind == "translation":
        return kind, f"Translate German to English: {random.choice(GERMAN)}"
    if kind == "math":
        name, thing = random.choice(NAMES), random.choice(THINGS)
        opening = random.choice(
            (
                f"{name} has {random.randint(2, 60)} {thing}",
                f"{name} buys {random.randint(2, 30)} {thing} for ${random.randint(1, 20)} each",
                f"A farmer has {random.randint(5, 90)} {thing}",
                f"If {name} walks {random.randint(2, 12)} miles",
                f"There are {random.randint(10, 200)} {thing} in",
                f"{name} and {random.choice(NAMES)} ",
                f"A train travels at {random.randint(20, 120)} miles per hour",
                f"{name} earns ${random.randint(8, 50)} an hour",
            )
        )
        return kind, opening
    return kind, random.choice(TOPICS)  # summary and grounded: a passage is written first
