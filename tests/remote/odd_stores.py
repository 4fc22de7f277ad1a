"""Stores that fail, lose answers, or watch what is asked of them."""

import random
import threading

from jitkern.remote.store import AccessDenied, Unavailable


class Odd:
    """A store whose verbs pass through `_strike(verb, name, call)`."""

    def __init__(self, store):
        self.store, self.url = store, store.url
        self.asked = []

    def _strike(self, verb, name, call):
        return call()

    def __getattr__(self, verb):
        def ask(name, *args, **options):
            self.asked.append((verb, name))
            return self._strike(
                verb, name, lambda: getattr(self.store, verb)(name, *args, **options)
            )

        return ask


class Failing(Odd):
    """Some requests fail, a part of them after they were carried out: their answer is lost."""

    def __init__(self, store, *, seed, share=0.3):
        super().__init__(store)
        self.random, self.share, self.lock = random.Random(seed), share, threading.Lock()

    def _strike(self, verb, name, call):
        with self.lock:
            fails, after = self.random.random() < self.share, self.random.random() < 0.5
        if fails and not after:
            raise Unavailable("it failed")
        answer = call()
        if fails:
            raise Unavailable("its answer was lost")
        return answer


class Policed(Odd):
    """A bucket whose policy lets nobody replace a bundle."""

    def _strike(self, verb, name, call):
        if verb == "replace" and ".tar" in name:
            raise AccessDenied("403")
        return call()


class Hindered(Odd):
    """Another writer changes the index whenever it was read."""

    def __init__(self, store, times):
        super().__init__(store)
        self.times = times

    def _strike(self, verb, name, call):
        if verb == "replace" and name.endswith("index.json") and self.times:
            self.times -= 1
            return False
        return call()
