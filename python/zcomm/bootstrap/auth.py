"""Proof of membership: the handshake on a new TCP connection before either end reads anything else.

[Note: proof] Three messages of fixed size. Each side proves that it knows the group's key, which itself never travels:
    listener -> caller    Challenge   magic, fresh nonce (a stranger learns nothing from it)
    caller -> listener    Answer      caller, listener and purpose, fresh nonce, MAC of all bytes so far
    listener -> caller    Reply       MAC of the same under another label. It completes the mutual authentication.
Nonces prevent replay. Labels prevent reflection, because one side's MAC is invalid as the other side's. The MAC covers
the line (ranks, purpose, number), so a connection cannot be passed off as another.
Later bytes are neither encrypted nor authenticated: the network between the hosts is trusted to carry them unchanged.
Source: RFC 2104 (HMAC), ISO/IEC 9798-4 (mutual authentication in three passes).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

MAGIC = b"zcommtc1"
_NONCE_NBYTES = 32
_MAC_NBYTES = 32
_CHALLENGE = struct.Struct(f"!8s{_NONCE_NBYTES}s")
_ANSWER = struct.Struct(f"!8sIIIHH{_NONCE_NBYTES}s{_MAC_NBYTES}s")  # magic, world, caller, listener, purpose, number
CHALLENGE_NBYTES = _CHALLENGE.size
ANSWER_NBYTES = _ANSWER.size
VERDICT_NBYTES = _MAC_NBYTES


class Purpose(enum.IntEnum):
    """Purpose of a connection."""

    DATA = 0  # parcels of Mesh.exchange
    CONTROL = 1  # goodbyes; EOF means that the peer has ended
    LINK = 2  # collectives and messages, numbered


@dataclass(frozen=True, order=True)
class Line:
    """One connection between two ranks of a world; the higher rank calls."""

    caller: int
    listener: int
    purpose: Purpose
    number: int = 0


def derive_key(secret: bytes, *words: bytes) -> bytes:
    """Derive a key for ``words``, which reveals neither ``secret`` nor other keys."""
    told = b"".join(len(word).to_bytes(8, "big") + word for word in words)
    return hmac.digest(secret, b"zcomm key" + told, hashlib.sha256)


def page_job(key: bytes) -> str:
    """Return the name of a job for ``zcomm top``, the same on all of its ranks. key: the ranks' secret."""
    return derive_key(key, b"page").hex()[:12]


def _mac(key: bytes, label: bytes, challenge: bytes, answer: bytes) -> bytes:
    return hmac.digest(key, label + challenge + answer, hashlib.sha256)


class CallerProof:
    """The caller's side of one conversation."""

    def __init__(self, key: bytes, line: Line, world_size: int) -> None:
        self._key = key
        self._line = line
        self._world_size = world_size
        self._expected: bytes | None = None

    def answer(self, challenge: bytes) -> bytes | None:
        """Return the answer to ``challenge``; None if its magic is wrong."""
        magic, _ = _CHALLENGE.unpack(challenge)
        if magic != MAGIC:
            return None
        line = self._line
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        told = _ANSWER.pack(
            MAGIC, self._world_size, line.caller, line.listener, line.purpose, line.number, nonce, bytes(_MAC_NBYTES)
        )[:-_MAC_NBYTES]
        self._expected = _mac(self._key, b"listener", challenge, told)
        return told + _mac(self._key, b"caller", challenge, told)

    def accepts(self, reply: bytes) -> bool:
        """Return True if ``reply`` authenticates the listener."""
        return self._expected is not None and hmac.compare_digest(reply, self._expected)


class ListenerProof:
    """The listener's side of one conversation."""

    def __init__(self, key: bytes, rank: int, world_size: int) -> None:
        self._key = key
        self._rank = rank
        self._world_size = world_size
        self.challenge: bytes = _CHALLENGE.pack(MAGIC, secrets.token_bytes(_NONCE_NBYTES))

    def judge(self, answer: bytes) -> tuple[Line, bytes] | None:
        """Return the line and the reply to send, or None for a stranger."""
        told, mac = answer[:-_MAC_NBYTES], answer[-_MAC_NBYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, b"caller", self.challenge, told)):
            return None
        magic, world_size, caller, listener, purpose, number, _, _ = _ANSWER.unpack(answer)
        if magic != MAGIC or world_size != self._world_size or listener != self._rank or purpose > max(Purpose):
            return None
        line = Line(caller, listener, Purpose(purpose), number)
        return line, _mac(self._key, b"listener", self.challenge, told)
