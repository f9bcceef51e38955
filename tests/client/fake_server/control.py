"""What an operator asks for: information, pauses, sleep and the share of the GPU."""

import time

import grpc
from dorad.v1 import control_pb2, control_pb2_grpc

from .inference import CONTEXT_LENGTH, EOS, VOCAB


class FakeControl(control_pb2_grpc.ControlServiceServicer):
    """Works on what FakeServer keeps."""

    def GetInfo(self, request, context):
        while self.hang_info and context.is_active():
            time.sleep(0.01)
        if self.deny_info:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, self.deny_info)
        info = control_pb2.GetInfoResponse(
            version="0.0-fake", device="cpu", generation=self.generation
        )
        info.model.name, info.model.model_type = "fake-model", "llama"
        info.model.digest = self.model_digest
        info.model.vocab_size, info.model.context_length = VOCAB, CONTEXT_LENGTH
        info.model.eos_token_ids.append(EOS)
        info.limits.max_tokens, info.limits.max_draft_tokens = 2048, 1 << 18
        info.engine.running_sequences = self.running + self.running_of_others
        info.engine.queued_requests = self.queued
        info.engine.kv_pages_total, info.engine.kv_pages_used = 100, self.kv_pages_used
        info.engine.paused = self.paused
        info.engine.paused_adapters.extend(self.paused_adapters)
        info.engine.sleeping.extend(sorted(self.sleeping))
        info.engine.gpu_share = self.gpu_share()
        info.uptime.FromSeconds(90)
        info.memory_bytes["weights"] = 1 << 20
        info.peer_bytes_sent, info.peer_bytes_received = 3 << 20, 1 << 20
        return info

    def Pause(self, request, context):
        if request.adapter:
            self.paused_adapters.append(request.adapter)
        else:
            self.paused = True
        self.pause_modes.append(request.mode)
        return control_pb2.PauseResponse(affected=2)

    def Sleep(self, request, context):
        self.sleep_requests.append(request)
        new = set(request.tags or ["weights", "kv", "adapters"]) - self.sleeping
        self.sleeping |= new
        return control_pb2.SleepResponse(freed_bytes=dict.fromkeys(new, 1 << 20))

    def Wake(self, request, context):
        self.sleeping -= set(request.tags or ["weights", "kv", "adapters"])
        return control_pb2.WakeResponse()

    def LimitGpuShare(self, request, context):
        with self.lock:
            self.gpu_share_requests.append(request)
            if len(self.gpu_share_requests) in self.failing_limits:
                context.abort(grpc.StatusCode.INTERNAL, "injected")
            self.gpu_share_limits[request.limit_id] = request.gpu_share
            return control_pb2.LimitGpuShareResponse(gpu_share=self.gpu_share())

    def EndGpuShareLimit(self, request, context):
        ended = self.gpu_share_limits.pop(request.limit_id, None) is not None
        return control_pb2.EndGpuShareLimitResponse(ended=ended)

    def gpu_share(self):
        return min([1.0, *self.gpu_share_limits.values()])

    def Resume(self, request, context):
        if request.adapter:
            self.paused_adapters.remove(request.adapter)
        else:
            self.paused = False
        return control_pb2.ResumeResponse()
