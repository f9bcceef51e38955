"""Faults of the server by room, without those of forward passes (compute_faults.py)."""

from __future__ import annotations

from faults.fault import Fault

PLATFORM = [
    Fault(
        "reload applies every key",
        "server/platform/config/config_reload.cc",
        "      changes.waiting.push_back(key.path());\n      continue;\n",
        "      changes.waiting.push_back(key.path());\n",
        "SIGHUP changes keys that need a restart, and the log says that they wait for one.",
        ("platform:ConfigReloadTest.*",),
    ),
    Fault(
        "hash without frames",
        "server/platform/files/sha256.cc",
        "  UpdateU64(text.size());\n",
        "",
        "Two different adapters, or two salts of the prefix cache, can have one digest.",
        ("platform:Sha256Test.*", "adapter:JournalTest.*", "engine:KvPages.*"),
        ("integration/test_adapter_life.py",),
    ),
    Fault(
        "stopped time counts as silence",
        "server/platform/process/silence_meter.h",
        "silence_ + std::min(passed, period_)",
        "silence_ + passed",
        "A server that was suspended for a while is ended by its own watchdog.",
        ("platform:SilenceMeterTest.*",),
    ),
]

SECURITY = [
    Fault(
        "stream given back twice",
        "server/security/quotas.cc",
        "    --accounts_[tenant].streams;\n",
        "    accounts_[tenant].streams -= 2;\n",
        "A tenant gets more streams with each one that ends, without a limit.",
        ("security:QuotasTest.*",),
    ),
    Fault(
        "unused tokens pile up",
        "server/security/quotas.cc",
        "std::min(most, account.tokens + minutes * most)",
        "account.tokens + minutes * most",
        "A tenant that was idle overnight floods the server for the tokens of that night.",
        ("security:QuotasTest.*",),
    ),
    Fault(
        "publishers may put the server to sleep",
        "server/security/method_rules.cc",
        '{"Sleep", kAdmin, false}',
        '{"Sleep", kPublish, false}',
        "One tenant stops the server for all.",
        ("security", "rpc:MethodRulesTest.*"),
        ("integration/test_tokens.py",),
    ),
    Fault(
        "two authorizations are one",
        "server/security/authority.cc",
        "credentials.authorization.size() > 1",
        "credentials.authorization.size() > 2",
        "A caller behind a proxy that adds a token chooses which of both counts.",
        ("security:AuthorityTest.*",),
        ("integration/test_tokens.py",),
    ),
    Fault(
        "localhost counts without its address",
        "server/security/listener_policy.cc",
        '  if (host != "localhost") hints.ai_flags = AI_NUMERICHOST;\n',
        '  if (host == "localhost") return true;\n  hints.ai_flags = AI_NUMERICHOST;\n',
        "A server without tokens listens to others where localhost is another address.",
        (),
        ("integration/test_tls.py",),
    ),
]

ADAPTER = [
    Fault(
        "rsLoRA scale of the default rank",
        "server/adapter/peft/targets.cc",
        "std::sqrt(static_cast<double>(target.rank))",
        "std::sqrt(static_cast<double>(config.rank))",
        "Modules of rank_pattern are served with another strength than they were trained with.",
        ("adapter:AdapterAcceptanceTest.*",),
    ),
    Fault(
        "alpha_pattern ignored",
        "server/adapter/peft/targets.cc",
        "alphas.Get(module.name, config.alpha)",
        "config.alpha",
        "Modules of alpha_pattern are served with another strength than they were trained with.",
        ("adapter:AdapterAcceptanceTest.*",),
    ),
    Fault(
        "pattern matches a part of a name",
        "server/adapter/peft/targets.cc",
        'absl::StrCat(R"((.*\\.)?()", key, ")$")',
        'absl::StrCat(R"((.*\\.)?()", key, ")")',
        "rank_pattern changes modules whose names only begin like its entry.",
        ("adapter:AdapterAcceptanceTest.*",),
    ),
    Fault(
        "digest without the scale",
        "server/adapter/peft/digest.cc",
        "    hash.UpdateU64(std::bit_cast<uint64_t>(module->target.scale));\n",
        "",
        "Two adapters that differ in alpha share a digest, and so the prefix cache.",
        ("cpu:AdapterLoader*",),
    ),
    Fault(
        "journal's checksum not compared",
        "server/adapter/store/journal.cc",
        "if (!whole || rest.substr(kLengthDigits + 1, kCheckDigits) != check) {",
        "if (!whole) {",
        "A damaged journal restores versions that were never published.",
        ("adapter:JournalTest.*",),
    ),
    Fault(
        "journal not synced",
        "server/adapter/store/journal.cc",
        "  if (status.ok() && disk_->Sync(fd_.get()) != 0) "
        'status = DiskError("sync", path_, errno);\n',
        "",
        "A publish that was answered durable is lost in a power cut.",
        ("adapter:JournalTest.*:StoreTest.*",),
        ("integration/test_store_crash.py",),
    ),
    Fault(
        "generation compared the wrong way",
        "server/adapter/registry/registry_state.cc",
        "*expected == events.generation()",
        "*expected <= events.generation()",
        "A trainer with an old view of the registry overwrites another's activation.",
        ("adapter:AdapterRegistryTest.*",),
    ),
    Fault(
        "retired version still served",
        "server/adapter/registry/version_book.cc",
        "  if (version->record.state != AdapterState::kReady) return NotReady(version->record);\n",
        "  if (version->adapter == nullptr) return NotReady(version->record);\n",
        "New requests get a version that was retired, as long as older requests hold it.",
        ("adapter:AdapterRegistryTest.*",),
    ),
    Fault(
        "version numbers fall",
        "server/adapter/registry/version_book.cc",
        "  if (number <= last) {\n",
        "  if (number <= last && Find(name, number) != nullptr) {\n",
        "A number that was forgotten names other weights than before.",
        ("adapter:AdapterRegistryTest.*:RegistryLogTest.*",),
    ),
    Fault(
        "newest weights leave first",
        "server/adapter/residency/residency_room.cc",
        "next_hosted->last_use < next_stored->last_use",
        "next_hosted->last_use > next_stored->last_use",
        "The adapters that were used last are evicted, and each request waits for a reload.",
        ("adapter:Residency*",),
    ),
    Fault(
        "weights in use may be evicted",
        "server/adapter/residency/residency_lists.cc",
        "  if (record.pins > 0) return &in_use_;\n",
        "",
        "Weights are freed under a step that computes with them.",
        ("adapter:Residency*",),
    ),
    Fault(
        "degenerate norms accepted",
        "server/adapter/publish/builder.cc",
        "(norms[i] > eps || magnitude[i] == 0);",
        "(std::max<double>(norms[i], eps) >= eps || magnitude[i] == 0);",
        "An adapter whose norm vanishes is served with weights blown up by 1/eps.",
        ("cpu:AdapterLoader*",),
        ("integration/test_bad_adapters.py",),
    ),
    Fault(
        "announced digest not compared",
        "server/adapter/publish/reader.cc",
        "  DORAD_RETURN_IF_ERROR(CheckDigest(expected_digest, *digest));\n",
        "  (void)CheckDigest(expected_digest, *digest);\n",
        "Memory that its trainer overwrote during the copy is published.",
        ("cpu:AdapterLoader*",),
        ("integration/shared_memory/test_refusals.py",),
    ),
]

MODEL = [
    Fault(
        "rotary positions by turns in every model",
        "server/model/rope_config.cc",
        "family.mrope_order == Family::kInSections",
        "false",
        "Qwen2.5-VL turns an image's rows by the wrong positions.",
        ("model:VisionConfigTest.*",),
        ("golden/test_images.py",),
    ),
    Fault(
        "original context from the wrong place",
        "server/model/rope_config.cc",
        "  if (fields.Has(kKey)) return fields.Int(kKey, std::nullopt, kPositions);\n",
        "  if (!rope.Has(kKey) && fields.Has(kKey)) {\n"
        "    return fields.Int(kKey, std::nullopt, kPositions);\n"
        "  }\n",
        "Long prompts get other rotary angles than in transformers.",
        ("model:ModelConfigTest.*", "cpu:RopeTest.*"),
    ),
    Fault(
        "layers that slide turn as the others",
        "server/model/rope_config.cc",
        "layer.attention.rope = layer.attention.window > 0 ? 1 : 0;",
        "layer.attention.rope = 0;",
        "Five of six layers of Gemma get angles of another base.",
        ("model:GemmaTest.*",),
        ("golden/test_fidelity.py",),
    ),
    Fault(
        "norms without their one",
        "server/model/weight_import.cc",
        "  for (float& sum : sums) sum += 1.0f;\n",
        "",
        "Gemma's norms multiply by w in the place of 1 + w.",
        ("cpu:ModelWeightsTest.*",),
        ("golden/test_fidelity.py",),
    ),
]

COLOCATION = [
    Fault(
        "failed sleep never ends",
        "server/colocation/sleep_controller.cc",
        "  if (!released.ok() && asleep().empty()) "
        "(void)WakeEngine(/*kv=*/false, /*go_on=*/true);\n",
        "",
        "After a sleep that failed the server answers nothing, and no Wake helps.",
        ("colocation:SleepControllerTest.*",),
    ),
    Fault(
        "any user may read the weights",
        "server/colocation/listener.cc",
        "    if (!allowed_) {\n",
        "    if (!allowed_ && !IsWeightsRequest(packet.bytes)) {\n",
        "Every process of the host reads the base model's weights.",
        ("colocation:SharedMemoryListenerTest.*",),
        ("integration/test_base_weights.py",),
    ),
]

RPC = [
    Fault(
        "role check inverted",
        "server/rpc/access.cc",
        "if (!caller->roles.HasAnyOf(security::RuleOf(method).any_of)) {",
        "if (caller->roles.HasAnyOf(security::RuleOf(method).any_of)) {",
        "Callers may do exactly what their roles forbid.",
        ("rpc:ServerTest.*",),
        ("integration/test_tokens.py",),
    ),
    Fault(
        "similar names of other tenants shown",
        "server/rpc/access.cc",
        "    if (caller.MayTouch(name)) own.push_back(name);\n",
        "    if (name.size() >= caller.adapters.size()) own.push_back(name);\n",
        "A tenant reads the names of other tenants' adapters in an error.",
        ("rpc:ServerTest.*",),
        ("integration/test_tokens.py",),
    ),
    Fault(
        "upload accepts a repeated chunk",
        "server/rpc/upload.cc",
        "if (chunk.offset() != received()) {",
        "if (chunk.offset() > received()) {",
        "A chunk that is sent twice shifts all that follows, and the adapter is damaged.",
        ("rpc:UploadTest.*",),
    ),
    Fault(
        "page token of another list",
        "server/rpc/page_token.cc",
        "parts[1] == filter &&",
        "(filter.empty() || parts[1] == filter) &&",
        "A page token of one name continues the list of all, and versions are left out.",
        ("rpc:PageToken.*",),
    ),
    Fault(
        "refusals without a hint are retried",
        "server/rpc/status.cc",
        'if (status.code() == absl::StatusCode::kResourceExhausted) return "-1";',
        'if (status.code() == absl::StatusCode::kResourceExhausted) return "1";',
        "Clients repeat at once what can never succeed, and load the server.",
        ("rpc:RetryPushback.*",),
    ),
    Fault(
        "an image in a prompt is read as text",
        "server/rpc/image_validation.cc",
        "      CheckNoImages(text.field, *text.ids, limits, violations);\n",
        "",
        "The placeholder of an image is answered as if it were text.",
        ("rpc:ParseGenerate.*",),
        ("golden/test_parts.py",),
    ),
]

APP = [
    Fault(
        "failed start exits with 0",
        "server/app/commands.cc",
        "if (!app.ok()) return FailStart(*config, app.status());",
        "if (!app.ok()) return FailStart(*config, app.status()), kExitOk;",
        "A supervisor takes a server that cannot start for one that has finished.",
        tests=("integration/test_bad_starts.py",),
    ),
    Fault(
        "probe failures add up",
        "server/app/listener_health_check.cc",
        "failures[i] = status.ok() ? 0 : failures[i] + 1;",
        "failures[i] += status.ok() ? 0 : 1;",
        "Three slow moments in a month end the server.",
        ("app:ListenerHealthCheckTest.*",),
    ),
]
