"""What the multi-turn chat benchmark asks: texts, sessions and the order in which sessions advance.

Everything here is a pure function of the seed, so two runs with equal settings ask the same questions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ORDERS = ("round-robin", "depth-first", "random")

_TEXT = """
able about above accept across action active actual add address advice after again age agree air all allow
almost alone along also always among amount animal another answer any apart appear apple area argue arm
around arrive art ask author autumn away baby back bad bag ball bank base basic battle bear beat beautiful
because become before begin behind believe best better between big bird black blood blue board boat body
book born both bottom box boy branch bread break bridge bright bring broad brother brown build burn bus
business busy buy call calm camp can capital car card care carry case catch cause cell center central
certain chair chance change charge cheap check child choice choose church circle city claim class clean
clear climb clock close cloth cloud coast coat cold collect color come common company compare complete
concern condition consider contain continue control cook cool copy corn corner cost cotton count country
couple course court cover cross crowd cry culture current cut dance dark date daughter day deal decide deep
degree depend describe desert design detail develop differ dinner direct discuss distance divide doctor dog
dollar door double doubt down draw dream dress drink drive drop dry during early earth east easy eat edge
effect egg eight either else empty end energy engine enjoy enough enter equal even evening event ever every
exact example except expect explain eye face fact fair fall family famous far farm fast father favor fear
feed feel field fight figure fill film final find fine finger finish fire first fish five floor flow flower
fly follow food foot force foreign forest forget form forward four free fresh friend front fruit full game
garden gas general get gift girl give glad glass gold good govern grand grass gray great green ground group
grow guess guide hair half hall hand happen happy hard have head health hear heart heat heavy help high hill
history hold hole home hope horse hospital hot hotel hour house how human hundred hurry husband ice idea
imagine important inch increase industry inside interest iron island job join journey joy judge jump just
keep key kind king kitchen know land language large last late laugh law lead learn least leave left leg
length less letter level library life light like line list listen little live local long look lose lot love
low lunch machine main major make man many map mark market master matter may mean measure meat meet member
metal method middle might mile milk mind minute miss model modern moment money month moon more morning most
mother motion mountain mouth move much music must name nation nature near neck need never new news next
night nine noise north nose note nothing notice number object ocean off offer office often oil old once one
only open order other outside over own page paint pair paper parent park part party pass past path pattern
pay peace people perhaps period person picture piece place plain plan plane planet plant play please point
poor popular position possible power practice prepare present press pretty price print problem process
produce product program promise protect prove provide public pull purpose push quarter question quick quiet
race radio rain raise range rate reach read ready real reason receive record red region remember repeat
reply report rest result return rice rich ride right ring rise river road rock roll room root rope rose
round rule run safe sail salt same sand save say scale school science sea search season seat second secret
section see seed seem sell send sense sentence separate serve set seven several shape share sharp ship shoe
shop short should shoulder show side sign silver similar simple since sing sister sit six size skill skin
sky sleep slow small smell smile snow social soft soil soldier some son song soon sound south space speak
special speed spend spring square stage stand star start state station stay steam steel step still stone
stop store storm story straight strange stream street strong student study subject sudden sugar suggest
summer sun supply support sure surface surprise sweet swim system table tail take talk tall teach team tell
ten term test than thank thick thin thing think third thousand three through time tiny together tomorrow
tone tool top total touch toward town track trade train travel tree triangle trip trouble truck true trust
try turn twenty two type uncle under unit until use usual valley value various very view village visit voice
wait walk wall want war warm wash watch water wave way wear weather week weight well west wheel while white
whole wide wife wild will win wind window winter wire wish with woman wonder wood word work world worth
write wrong yard year yellow yes yesterday young
"""
WORDS = _TEXT.split()

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Shape:
    """Size of the workload; token counts are of the text alone, without the chat template."""

    sessions: int
    rounds: int
    system_tokens: int
    first_tokens: int
    turn_tokens: int
    seed: int
    tokens_per_word: float

    def words(self, tokens: int) -> int:
        """Number of words that make about `tokens` tokens, at least one."""
        return max(1, round(tokens / self.tokens_per_word))


def plain_text(rng: random.Random, words: int) -> str:
    """Sentences of 8 to 14 common English words, `words` words in all."""
    sentences = []
    while words > 0:
        length = min(words, rng.randint(8, 14))
        sentences.append(" ".join(rng.choice(WORDS) for _ in range(length)).capitalize() + ".")
        words -= length
    return " ".join(sentences)


def system_text(shape: Shape) -> str:
    """The system prompt that all sessions share; empty if `system_tokens` is 0."""
    if shape.system_tokens == 0:
        return ""
    return plain_text(random.Random(f"{shape.seed}/system"), shape.words(shape.system_tokens))


def user_text(shape: Shape, session: int, round_: int) -> str:
    """The user's text in a round (from 1); the first round opens with a sentence unique to the session."""
    rng = random.Random(f"{shape.seed}/session/{session}/round/{round_}")
    if round_ > 1:
        return plain_text(rng, shape.words(shape.turn_tokens))
    # The number comes first, so that sessions part at their first token after the system prompt.
    opening = f"{session + 1} is our number, and we speak of {rng.choice(WORDS)} and {rng.choice(WORDS)}."
    rest = shape.words(shape.first_tokens) - len(opening.split())
    return f"{opening} {plain_text(rng, rest)}" if rest > 0 else opening


def build_messages(system: str, users: list[str], answers: list[str]) -> Messages:
    """The whole chat so far: the system prompt if any, then users and answers in turn, ending with a user.

    Raises ValueError unless there is exactly one user text more than answers.
    """
    if len(users) != len(answers) + 1:
        raise ValueError(f"{len(users)} user texts do not alternate with {len(answers)} answers")
    messages = [{"role": "system", "content": system}] if system else []
    for i, user in enumerate(users):
        messages.append({"role": "user", "content": user})
        if i < len(answers):
            messages.append({"role": "assistant", "content": answers[i]})
    return messages


def order_key(order: str, seed: int, session: int, round_: int) -> tuple[float, int]:
    """Rank of a turn: of the sessions ready to advance, the one with the least key goes next."""
    if order == "round-robin":
        return (round_, session)
    if order == "depth-first":
        return (session, round_)
    if order == "random":
        return (random.Random(f"{seed}/order/{session}/{round_}").random(), session)
    raise ValueError(f"unknown order {order!r}")
