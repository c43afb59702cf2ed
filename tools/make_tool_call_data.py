"""Write manifests/data/tool-calls: rows of our own that teach a small model to call tools.

    python tools/make_tool_call_data.py            # writes train.jsonl and heldout.jsonl
    python tools/make_tool_call_data.py --check    # only says whether the files are these

A row offers three tools, asks for something, and is answered with a call; some go on with the tool's
result. Held-out rows have values, sets of offered tools and every other phrasing that no training row
has, and two tools (`UNSEEN`) that training never shows. Choices are made by SHA-256, so that any version of
Python writes the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "manifests" / "data" / "tool-calls"
TRAIN_ROWS_PER_TOOL, HELD_OUT_ROWS_PER_TOOL = 40, 10
UNSEEN = ("book_table", "translate")

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": t} for t in ("string", "integer", "number", "boolean"))
STRINGS = {"type": "array", "items": STRING}


def one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


TOOLS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "get_weather": ("Weather now", {"city": STRING, "unit": one_of("celsius", "fahrenheit")}, ("city",)),
    "set_timer": ("Start a timer", {"minutes": INTEGER, "label": STRING}, ("minutes",)),
    "convert_currency": (
        "Convert money",
        {"amount": NUMBER, "from": STRING, "to": STRING},
        ("amount", "from", "to"),
    ),
    "send_message": ("Send a text", {"to": STRING, "text": STRING}, ("to", "text")),
    "play_music": ("Play a song", {"title": STRING, "artist": STRING, "shuffle": BOOLEAN}, ("title",)),
    "add_to_list": ("Add items to a list", {"list": STRING, "items": STRINGS}, ("list", "items")),
    "set_lights": ("Set lights", {"room": STRING, "on": BOOLEAN, "brightness": INTEGER}, ("room", "on")),
    "find_route": (
        "Plan a trip",
        {"from": STRING, "to": STRING, "mode": one_of("foot", "bike", "car", "train")},
        ("from", "to", "mode"),
    ),
    "create_event": (
        "Add to calendar",
        {"title": STRING, "date": STRING, "guests": STRINGS},
        ("title", "date"),
    ),
    "search_files": (
        "Find files",
        {"query": STRING, "kind": one_of("pdf", "image", "text"), "limit": INTEGER},
        ("query",),
    ),
    "book_table": (
        "Reserve a table",
        {"place": STRING, "people": INTEGER, "time": STRING},
        ("place", "people", "time"),
    ),
    "translate": ("Translate text", {"text": STRING, "language": STRING}, ("text", "language")),
}
"""Name: description, parameters, those that are required."""

Phrase = tuple[str, dict[str, Any]]


def says(text: str, **fixed: Any) -> Phrase:
    """A request: `{slot}` is the value of the argument of that name, `fixed` are arguments it implies."""
    return text, fixed


PHRASES: dict[str, list[Phrase]] = {
    "get_weather": [
        says("What's the weather in {city}?"),
        says("Is it cold in {city} right now?"),
        says("How warm is it in {city}, in {unit}?"),
        says("Give me the temperature of {city} in degrees {unit}."),
        says("Will I need an umbrella in {city} today?"),
        says("I'm off to {city}. What should I expect outside?"),
        says("{city} weather in {unit}, please."),
        says("Tell me about the sky over {city}."),
    ],
    "set_timer": [
        says("Set a timer for {minutes} minutes."),
        says("Wake me in {minutes} minutes."),
        says("Timer, {minutes} minutes, for the {label}."),
        says("The {label} needs {minutes} minutes. Start counting."),
        says("Could you time {minutes} minutes for me?"),
        says("{minutes} minute countdown, please."),
        says("Remind me about the {label} in {minutes} minutes."),
        says("Start the {label} timer: {minutes} minutes."),
    ],
    "convert_currency": [
        says("How much is {amount} {from} in {to}?"),
        says("I have {amount} {from}. What is that in {to}?"),
        says("Convert {amount} {from} to {to}."),
        says("Change {amount} {from} into {to} for me."),
        says("What do I get in {to} for {amount} {from}?"),
        says("{amount} {from} to {to}, please."),
    ],
    "send_message": [
        says('Text {to}: "{text}"'),
        says('Let {to} know: "{text}"'),
        says('Send {to} the message "{text}".'),
        says('Please write "{text}" to {to}.'),
        says('Message for {to}: "{text}"'),
        says('Tell {to} "{text}" for me.'),
    ],
    "play_music": [
        says("Play {title}."),
        says("I want to hear {title}."),
        says("Play {title} by {artist}."),
        says("Could we have {title} from {artist}?"),
        says("Put on {title} and shuffle.", shuffle=True),
        says("Start {title} by {artist}, no shuffle.", shuffle=False),
        says("How about some {title} by {artist}?"),
        says("Shuffle {title}, please.", shuffle=True),
    ],
    "add_to_list": [
        says("Put {items} on my {list} list."),
        says("My {list} list lacks {items}."),
        says("Add {items} to the {list} list."),
        says("Write down {items} under {list}."),
        says("{list}: {items}. Note that, please."),
        says("We need {items}. Add it to {list}."),
    ],
    "set_lights": [
        says("Switch off the lights in the {room}.", on=False),
        says("The {room} should be dark.", on=False),
        says("Turn on the {room} lights.", on=True),
        says("Light up the {room}, please.", on=True),
        says("{room} lights on at {brightness} percent.", on=True),
        says("Make it {brightness} percent bright in the {room}.", on=True),
        says("Lights out in the {room}.", on=False),
        says("Turn the {room} lights on with brightness {brightness}.", on=True),
    ],
    "find_route": [
        says("How do I get from {from} to {to} by {mode}?"),
        says("I'm at {from} and want to be at {to}, by {mode}."),
        says("Route from {from} to {to}, by {mode}."),
        says("Take me to {to} by {mode}. I start at {from}."),
        says("What's the way from {from} to {to} if I go by {mode}?"),
        says("{from} to {to} by {mode}, please."),
    ],
    "create_event": [
        says("Put {title} in my calendar on {date}."),
        says("{date} is the day of {title}. Note it."),
        says("Schedule {title} for {date} with {guests}."),
        says("Plan {title} on {date} and invite {guests}."),
        says("New event: {title}, {date}."),
        says("Add {title} on {date}; {guests} will come."),
    ],
    "search_files": [
        says("Find my {query}."),
        says("Where did I put the {query}?"),
        says("Look for {query} as {kind}."),
        says("Any {kind} files about {query}?"),
        says("Show me at most {limit} files on {query}."),
        says("Search for {query}, {limit} results."),
        says("I need the {query}, {kind} only, up to {limit}."),
        says("Do I have anything on {query}?"),
    ],
    "book_table": [
        says("Book a table for {people} at {place} at {time}."),
        says("We are {people} and want to eat at {place}, {time}."),
        says("Reserve {place} at {time} for {people} people."),
        says("Dinner for {people} at {place}, {time}, please."),
    ],
    "translate": [
        says('Translate "{text}" into {language}.'),
        says('How do you say "{text}" in {language}?'),
        says('What is "{text}" in {language}?'),
        says('Put "{text}" into {language} for me.'),
    ],
}
"""The second and every other one after it is in held-out rows only."""

PEOPLE = (
    ["Ana", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas"],
    ["Kim", "Lena", "Marco", "Nadia", "Oscar", "Priya", "Rosa", "Tom"],
)
PLACES = (
    [
        "Market Square",
        "City Hall",
        "Elm Street",
        "Harbor Quay",
        "Castle Hill",
        "Rose Garden",
        "Bridge Street",
    ],
    ["Oak Avenue", "North Gate", "Mill Lane", "Kings Park", "Tower Road", "Central Station"],
)
CURRENCIES = (
    ["USD", "EUR", "GBP", "JPY", "CHF", "SEK", "INR", "BRL"],
    ["NOK", "CAD", "PLN", "AUD", "KRW", "MXN"],
)
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "city": (
        [
            "Oslo",
            "Turin",
            "Lima",
            "Nairobi",
            "Osaka",
            "Boston",
            "Kraków",
            "Porto",
            "Cairo",
            "Quito",
            "Leeds",
            "Zürich",
            "Austin",
            "Perth",
            "Hanoi",
            "Dakar",
        ],
        [
            "Bergen",
            "Lyon",
            "Bogotá",
            "Accra",
            "Kyoto",
            "Denver",
            "Gdańsk",
            "Seville",
            "Tunis",
            "Graz",
            "Cork",
            "Basel",
        ],
    ),
    "minutes": ([3, 5, 8, 10, 12, 15, 20, 25, 30, 45, 50, 60], [4, 7, 9, 11, 14, 18, 22, 35, 40, 55]),
    "label": (
        ["pasta", "tea", "laundry", "bread", "nap", "eggs", "homework", "workout"],
        ["rice", "pizza", "sauna", "dishwasher", "essay", "soup"],
    ),
    "amount": (
        [12.5, 20, 49.99, 75, 100, 130.4, 250, 18.2, 999, 3.75, 60, 8.5],
        [15.5, 64, 82.25, 120, 340, 7.1, 510, 27.8],
    ),
    "convert_currency.from": CURRENCIES,
    "convert_currency.to": CURRENCIES,
    "send_message.to": PEOPLE,
    "guests": PEOPLE,
    "send_message.text": (
        [
            "I'm running late",
            "happy birthday",
            "the keys are under the mat",
            "dinner is at eight",
            "call me back",
            "thanks for the flowers",
            "the train is cancelled",
            "see you on Monday",
        ],
        [
            "I'm at the station",
            "good luck today",
            "the parcel has arrived",
            "bring an umbrella",
            "the meeting moved to noon",
            "we won the match",
        ],
    ),
    "play_music.title": (
        [
            "Blue Harbor",
            "Night Train",
            "Paper Moon",
            "Golden Fields",
            "Silver Rain",
            "Last Summer",
            "Slow Dance",
            "Amber Sky",
            "Long Road",
        ],
        ["Winter Roads", "Glass River", "Open Window", "Red Balloon", "Green Hills"],
    ),
    "artist": (
        ["The Lanterns", "Mira Holt", "Echo Trio", "Juno West", "Paul Arden"],
        ["Nora Finch", "The Tidepools", "Sam Ostrow", "Lila Grey"],
    ),
    "list": (["groceries", "hardware", "packing", "gifts"], ["pharmacy", "garden", "party"]),
    "items": (
        ["milk", "bread", "apples", "nails", "tape", "socks", "candles", "rice", "soap", "paint"],
        ["aspirin", "seeds", "balloons", "cheese", "batteries", "towels", "tomatoes", "napkins"],
    ),
    "room": (
        ["kitchen", "bedroom", "hall", "office", "bathroom", "garage", "balcony", "library", "pantry"],
        ["attic", "nursery", "cellar", "studio", "porch"],
    ),
    "brightness": ([10, 20, 30, 40, 60, 80, 100], [15, 25, 35, 55, 70, 90]),
    "find_route.from": PLACES,
    "find_route.to": PLACES,
    "create_event.title": (
        ["Team Lunch", "Dentist", "Book Club", "Budget Review", "Piano Lesson", "Board Meeting"],
        ["Site Visit", "Haircut", "Chess Night", "Yoga Class", "Kickoff"],
    ),
    "date": (
        ["2026-12-03", "2026-12-10", "2026-12-15", "2027-01-08", "2027-01-19", "2027-02-02", "2027-02-25"],
        ["2027-03-04", "2027-03-17", "2027-04-09", "2027-04-21", "2027-05-06"],
    ),
    "query": (
        ["tax return", "holiday photos", "meeting notes", "lease contract", "cake recipe", "school report"],
        ["travel plan", "car invoice", "thesis draft", "floor plan", "wedding speech"],
    ),
    "limit": ([2, 3, 5, 10, 20], [4, 6, 8, 15]),
    "place": ([], ["Old Mill", "La Perla", "Noodle Bar", "Blue Door", "Casa Lola"]),
    "people": ([], [2, 3, 4, 5, 6, 7, 8]),
    "time": ([], ["18:45", "20:30", "19:15", "12:15", "13:45"]),
    "translate.text": (
        [],
        ["good night", "where is the museum", "the bill, please", "I am hungry", "thank you"],
    ),
    "language": ([], ["German", "Turkish", "Korean", "Dutch", "Greek", "Polish"]),
}
"""For an argument, or for one of a tool: what training shows, and what is held out."""

RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "get_weather": ({"sky": "clear"}, "The sky over {city} is clear."),
    "set_timer": ({"ok": True}, "Your timer runs for {minutes} minutes."),
    "send_message": ({"sent": True}, "Your message to {to} is sent."),
    "add_to_list": ({"ok": True}, "I put {items} on the {list} list."),
    "search_files": ({"found": 0}, "I found nothing on {query}."),
}


class Choices:
    """A stream of choices that depends on its name alone."""

    def __init__(self, *name: object) -> None:
        self._name = "/".join(map(str, name))
        self._count = 0

    def below(self, limit: int) -> int:
        self._count += 1
        digest = hashlib.sha256(f"{self._name}#{self._count}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % limit

    def one(self, values: Sequence[Any]) -> Any:
        return values[self.below(len(values))]

    def some(self, values: Sequence[Any], count: int) -> list[Any]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def tool(name: str) -> dict[str, Any]:
    description, properties, required = TOOLS[name]
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def slots(phrase: str, name: str) -> list[str]:
    return [argument for argument in TOOLS[name][1] if f"{{{argument}}}" in phrase]


def arguments_of(name: str, phrase: Phrase, choices: Choices, *, held_out: bool) -> dict[str, Any]:
    """The arguments that a request means, in the order of the tool's parameters."""
    text, fixed = phrase
    found = dict(fixed)
    for argument in slots(text, name):
        schema = TOOLS[name][1][argument]
        pool = (
            schema.get("enum") or VALUES.get(f"{name}.{argument}", VALUES.get(argument, ((), ())))[held_out]
        )
        if schema is STRINGS:
            found[argument] = choices.some(pool, 2 + (argument == "items" and choices.below(2)))
        else:
            found[argument] = choices.one([value for value in pool if value not in found.values()])
    return {argument: found[argument] for argument in TOOLS[name][1] if argument in found}


def spoken(value: Any) -> str:
    if isinstance(value, list):
        return f"{', '.join(value[:-1])} and {value[-1]}"
    return str(value)


def filled(text: str, arguments: dict[str, Any]) -> str:
    # Not str.format: "from" is a slot, and a text may hold braces.
    for argument, value in arguments.items():
        text = text.replace(f"{{{argument}}}", spoken(value))
    return text[0].upper() + text[1:]


def triples(name: str, *, held_out: bool) -> list[tuple[str, ...]]:
    """Sets of three tools that may be offered with `name`; none is on both sides."""
    sides = []
    for names in combinations(sorted(TOOLS), 3):
        is_held_out = bool(set(names) & set(UNSEEN)) or Choices("triple", *names).below(4) == 0
        if name in names and is_held_out == held_out:
            sides.append(names)
    return sides


def row(name: str, number: int, attempt: int, *, held_out: bool) -> dict[str, Any]:
    choices = Choices("row", name, number, attempt, held_out)
    phrases = PHRASES[name] if held_out else PHRASES[name][0::2]
    # A phrasing with one slot runs out of requests before one with three does.
    phrase = phrases[(number + attempt // 50) % len(phrases)]
    arguments = arguments_of(name, phrase, choices, held_out=held_out)
    offered = choices.some(choices.one(triples(name, held_out=held_out)), 3)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": filled(phrase[0], arguments)},
        {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]},
    ]
    if name in RESULTS and number % 10 == 7:
        result, answer = RESULTS[name]
        if all(argument in arguments for argument in slots(answer, name)):
            messages.append({"role": "tool", "content": json.dumps(result)})
            messages.append({"role": "assistant", "content": filled(answer, arguments)})
    return {"messages": messages, "tools": [tool(one) for one in offered]}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": name, "arguments": text}}


def rows(*, held_out: bool) -> list[dict[str, Any]]:
    """All rows of one side, no request twice, in a mixed order."""
    made: dict[str, dict[str, Any]] = {}
    for name in TOOLS:
        if name in UNSEEN and not held_out:
            continue
        for number in range(HELD_OUT_ROWS_PER_TOOL if held_out else TRAIN_ROWS_PER_TOOL):
            for attempt in range(1000):
                candidate = row(name, number, attempt, held_out=held_out)
                request = candidate["messages"][0]["content"]
                if request not in made:
                    made[request] = candidate
                    break
            else:
                raise SystemExit(f"{name}: no new request for row {number}")
    return [made[text] for text in sorted(made, key=lambda text: hashlib.sha256(text.encode()).digest())]


def lines(*, held_out: bool) -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows(held_out=held_out)).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write manifests/data/tool-calls.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is another")
    check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part, held_out in (("train", False), ("heldout", True)):
        path, content = FOLDER / f"{part}.jsonl", lines(held_out=held_out)
        if not check:
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            sys.exit(f"{path} is not what this script writes; run it without --check")
        count = content.count(b"\n")
        print(f"{path}: {count} rows, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
