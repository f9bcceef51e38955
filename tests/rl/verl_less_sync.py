"""dorad.verl without the update after step 3: what the test's threshold must notice."""

import dorad.verl  # noqa: F401
from dorad._verl.rollout import Rollout

_update_weights = Rollout.update_weights


async def update_weights(self, weights, *arguments, global_steps=None, **options):
    if global_steps == 3:
        await self._server.set_global_steps.remote(global_steps)
    else:
        await _update_weights(self, weights, *arguments, global_steps=global_steps, **options)


Rollout.update_weights = update_weights
