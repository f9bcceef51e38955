"""The model: tokens and log-probabilities from the prompt alone."""

import time

import grpc
from dorad.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from .encoding import ids, pack_floats, pack_ints
from .errors import fail

VOCAB = 1000
CONTEXT_LENGTH = 1 << 15
EOS = 2


def kept_prompt(request):
    prompt = ids(request.prompt_token_ids)
    if request.HasField("truncate_prompt_tokens"):
        prompt = prompt[-request.truncate_prompt_tokens :]
    return prompt


def fill_score(score, tokens, adapter, k, chosen):
    """`adapter` is an index."""
    score.logprobs = pack_floats([float("nan")] + [-(x + adapter) / 100 for x in tokens[1:]])
    if k:
        score.top_logprobs.k = k
        rows = [[-1] * k] + [list(range(k))] * (len(tokens) - 1)
        score.top_logprobs.token_ids = pack_ints(rows)
        score.top_logprobs.logprobs = pack_floats(
            [[float("nan") if x < 0 else -x for x in row] for row in rows]
        )
    score.chosen_logprobs = pack_floats([[-c / 10 for c in chosen] for _ in tokens])


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Works on what FakeServer keeps."""

    def Generate(self, request, context):
        with self.lock:
            self.generate_calls.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            refuse = self.refuse_generate.pop(0) if self.refuse_generate else None
            full = self.capacity is not None and self.running >= self.capacity
            if refuse is None and not full:
                self.running += 1
                self.most_running = max(self.most_running, self.running)
        if refuse is not None:
            refuse(context)
        if full:
            fail(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                "the queue is full",
                retry_after=0.02,
            )
        context.add_callback(lambda: self._on_end(context))
        running = True
        try:
            for message, last in self._tokens(request, context):
                if last:
                    # Before it is sent: its reader may begin the next request at once.
                    self._leave()
                    running = False
                yield message
        finally:
            if running:
                self._leave()

    def _leave(self):
        with self.lock:
            self.running -= 1
            self.lock.notify_all()

    def _tokens(self, request, context):
        """Messages, each with whether it is the request's last."""
        prompt = kept_prompt(request)
        if not prompt:
            fail(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "EMPTY_PROMPT",
                "2 problems with the request",
                [("prompt_token_ids", "EMPTY_PROMPT", "is empty"), ("n", "OUT_OF_RANGE", "is 0")],
            )
        span = self.resolve(context, request.adapter)
        n = request.n if request.HasField("n") else 1
        count = request.stop.max_tokens if request.stop.HasField("max_tokens") else 8
        first = sum(prompt)
        tokens = {i: [(first + 10 * i + t) % VOCAB for t in range(count)] for i in range(n)}
        streaming = request.response_mode == inference_pb2.RESPONSE_MODE_STREAM
        sent = 0
        if streaming:
            position = 0
            while self.endless or position < count:
                if not context.is_active():
                    return
                for i in range(n):
                    token = (first + 10 * i + position) % VOCAB
                    last = not self.endless and position == count - 1
                    if self.break_after is not None and sent >= self.break_after:
                        self.break_with(context)
                    message = self._message(request, span, i, position, [token], last)
                    yield message, last and i == n - 1
                    sent += 1
                position += 1
                time.sleep(self.token_delay)
        else:
            end = time.monotonic() + self.token_delay * count
            while self.endless or time.monotonic() < end:
                if not context.is_active():
                    return
                time.sleep(0.002)
            for i in range(n):
                yield self._message(request, span, i, 0, tokens[i], True), i == n - 1
        context.dorad_done = True

    def _message(self, request, span, index, begin, tokens, last):
        message = inference_pb2.GenerateResponse(
            request_id=request.request_id or "fake",
            sample_index=index,
            token_ids=pack_ints(tokens),
            seed=request.sampling.seed if request.sampling.HasField("seed") else 7,
        )
        message.spans.add().CopyFrom(span)
        message.spans[0].begin, message.spans[0].end = begin, begin + len(tokens)
        if request.HasField("logprobs"):
            message.logprobs = pack_floats([-(x + 1) / 100 for x in tokens])
            k = request.logprobs.top_k
            if k:
                message.top_logprobs.k = k
                message.top_logprobs.token_ids = pack_ints(
                    [[(x + j) % VOCAB for j in range(k)] for x in tokens]
                )
                message.top_logprobs.logprobs = pack_floats(
                    [[-j for j in range(k)] for _ in tokens]
                )
            chosen = ids(request.logprobs.chosen_token_ids)
            message.chosen_logprobs = pack_floats([[-c / 10 for c in chosen] for _ in tokens])
            if request.logprobs.prompt and index == 0 and begin == 0:
                score = inference_pb2.SequenceScore()
                fill_score(score, kept_prompt(request), 0, k, chosen)
                message.prompt_logprobs.CopyFrom(score)
        if last:
            stop = tokens and tokens[-1] in [EOS, *ids(request.stop.stop_token_ids)]
            message.finish.reason = self.finish_reason or (
                types_pb2.FINISH_REASON_STOP if stop else types_pb2.FINISH_REASON_LENGTH
            )
            if stop:
                message.finish.stop_token_id = tokens[-1]
            usage = message.finish.usage
            usage.prompt_tokens = len(kept_prompt(request))
            usage.generated_tokens = begin + len(tokens)
            usage.time_to_first_token.FromMilliseconds(1500)
        return message

    def Score(self, request, context):
        adapters = [self.resolve(context, ref) for ref in request.adapters]
        answer = inference_pb2.ScoreResponse(request_id=request.request_id, versions=adapters)
        chosen = ids(request.chosen_token_ids)
        for sequence in request.sequences:
            tokens = ids(sequence.token_ids)
            scored = answer.sequences.add()
            for a, _ in enumerate(adapters):
                fill_score(scored.scores.add(), tokens, a, request.top_k, chosen)
        return answer

    def Abort(self, request, context):
        with self.lock:
            self.aborts.append(request)
        return inference_pb2.AbortResponse(aborted=3)
