"""key_phrases: English texts out of ui_phrases and the three phrases of each that say most, made when it is prepared.

A text is three interface texts one behind the other. Candidates are its runs of words between function words and
punctuation, as in RAKE (Rose et al. 2010). The three whose words are rarest in the training split (by the sum of
log(texts / texts with the word), Sparck Jones 1972) are the target, in the order of the text: "battery level; geofence;
front door". Each interface text is in three texts, with other neighbours. About 16,400 texts for training, 1,000 each
for validation and test.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import tensorflow_datasets as tfds

from train.data.builders.ui_phrases import SPLITS, english_texts

SEPARATOR = "; "
_TEXTS, _PHRASES, _ORDERS = 3, 3, 3
_LONGEST = 4  # words of a phrase
_WORDS_BETWEEN = """
    a about after again all also an and any are as at be because been before being but by can could did do does for from
    had has have here how if in into is it its may more most must no not of off on once one only or other our out over
    please should so some such than that the their them then there these they this those to too under until up using via
    was were what when where whether which while who why will with within without would you your
"""
_FUNCTION_WORDS = frozenset(_WORDS_BETWEEN.split())
_RUN = re.compile(r"[^\W_][\w'/-]*(?: [^\W_][\w'/-]*)*")  # words with single spaces between them


class KeyPhrases(tfds.core.GeneratorBasedBuilder):
    """The data set: "source" is the text, "target" its phrases."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "First version."}
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name="en", description="English.")]
    # TFDS would look for checksums of downloads, by way of a package that it does not install.
    url_infos = None

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict({"source": tfds.features.Text(), "target": tfds.features.Text()}),
            license="Apache-2.0",
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator[tuple[str, dict[str, str]]]]:
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, str]]]:
        for number, text in enumerate(joined(english_texts(split))):
            if phrases := key_phrases(text):
                yield f"{number} {text}", {"source": text, "target": SEPARATOR.join(phrases)}


def joined(texts: Sequence[str]) -> Iterator[str]:
    """Three texts one behind the other, in orders that depend on the texts alone."""
    for order in range(_ORDERS):
        shuffled = sorted(texts, key=lambda text: hashlib.sha256(f"{order} {text}".encode()).digest())
        for at in range(0, len(shuffled) - _TEXTS + 1, _TEXTS):
            group = shuffled[at : at + _TEXTS]
            yield " ".join(text if text[-1] in ".!?:" else f"{text}." for text in group)


def key_phrases(text: str) -> list[str]:
    """The phrases of a text that say most, at most three, in its order.

    >>> key_phrases("The battery level is low. Geofence of the front door")
    ['battery level', 'Geofence', 'front door']
    """
    counts, total = _text_counts()
    scores: dict[str, float] = {}
    for run in _RUN.findall(text):
        for between, words in itertools.groupby(run.split(), key=lambda word: word.lower() in _FUNCTION_WORDS):
            phrase = list(words)
            if not between and len(phrase) <= _LONGEST:
                score = sum(math.log(total / max(counts[word.lower()], 1)) for word in phrase)
                scores.setdefault(" ".join(phrase), score)
    best = sorted(scores, key=lambda phrase: -scores[phrase])[:_PHRASES]
    return [phrase for phrase in scores if phrase in best]


@functools.cache
def _text_counts() -> tuple[collections.Counter[str], int]:
    """In how many interface texts of the training split each word stands, and how many there are."""
    texts = english_texts("train")
    words = ({word.lower() for run in _RUN.findall(text) for word in run.split()} for text in texts)
    return collections.Counter(itertools.chain.from_iterable(words)), len(texts)
