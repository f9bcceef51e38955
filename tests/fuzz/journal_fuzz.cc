// libFuzzer target: whatever a journal's file holds, opening it gives records that were written, or
// refuses it as damaged; and a record is either no change or one that reads back as it is.
//
// The first byte chooses: the bytes are the file itself; they are one record; or they are lines, of
// which a journal is made that then loses its end or has one byte changed.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "server/adapter/registry/change_log.h"
#include "server/adapter/store/disk.h"
#include "server/adapter/store/journal.h"
#include "server/platform/check.h"
#include "server/platform/error.h"

namespace {

using dorad::adapter::Change;
using dorad::adapter::Journal;
using Records = std::vector<std::string>;

// Syncing is not what is looked for, and slow.
class NoSyncDisk final : public dorad::adapter::Disk {
 public:
  int Sync(int) override { return 0; }
};

class File {
 public:
  File() {
    std::string name = (std::filesystem::temp_directory_path() / "journal_fuzz.XXXXXX").string();
    DORAD_CHECK(mkdtemp(name.data()) != nullptr);
    folder_ = name;
  }
  ~File() { std::filesystem::remove_all(folder_); }

  std::string path() const { return (folder_ / "journal").string(); }
  void Write(const std::string& text) const {
    std::ofstream(path(), std::ios::binary | std::ios::trunc) << text;
  }

 private:
  std::filesystem::path folder_;
};

// The records, or nothing where it is refused.
bool Open(const File& file, Records* records) {
  static NoSyncDisk disk;
  const auto journal = Journal::Open(file.path(), &disk, records);
  if (!journal.ok()) {
    DORAD_CHECK(journal.status().code() == absl::StatusCode::kDataLoss);
    DORAD_CHECK(dorad::ReasonOf(journal.status()) == "STORE_DAMAGED");
    return false;
  }
  // It goes on behind what it has.
  DORAD_CHECK((*journal)->Append("one more").ok());
  Records again;
  const auto reopened = Journal::Open(file.path(), &disk, &again);
  DORAD_CHECK(reopened.ok());
  Records expected = *records;
  expected.push_back("one more");
  DORAD_CHECK(again == expected);
  return true;
}

void CheckFile(const File& file, const std::string& bytes) {
  file.Write(bytes);
  Records records;
  Open(file, &records);
}

void CheckRecord(const std::string& text) {
  int64_t format = 0;
  const auto change = dorad::adapter::ParseChange(text, &format);
  if (!change.ok()) {
    DORAD_CHECK(dorad::ReasonOf(change.status()) == "STORE_DAMAGED");
    return;
  }
  const auto again = dorad::adapter::ParseChange(dorad::adapter::ToJson(*change), &format);
  DORAD_CHECK(again.ok() && *again == *change);
  dorad::adapter::StoredState state;
  state.Apply(*change);
  dorad::adapter::StoredState rebuilt;
  for (const Change& step : state.ToChanges()) rebuilt.Apply(step);
  DORAD_CHECK(rebuilt.ToChanges() == state.ToChanges());
}

void CheckDamage(const File& file, const std::string& bytes) {
  if (bytes.size() < 4) return;
  const size_t place = static_cast<uint8_t>(bytes[0]) * 256u + static_cast<uint8_t>(bytes[1]);
  const char change = bytes[2];
  Records texts;
  std::istringstream lines(bytes.substr(3));
  for (std::string line; std::getline(lines, line);) {
    line.erase(std::remove(line.begin(), line.end(), '\0'), line.end());
    if (!line.empty()) texts.push_back(line);
  }
  std::string journal = Journal::Format(texts);
  if (journal.empty()) return;
  const size_t at = place % journal.size();
  if (change == 0) {
    journal.resize(at);
  } else {
    journal[at] = static_cast<char>(journal[at] ^ change);
  }
  file.Write(journal);
  Records records;
  const bool opened = Open(file, &records);
  DORAD_CHECK(change != 0 || opened);  // a crash while writing
  if (!opened) return;
  // What is given back is what was written, perhaps without the last record.
  DORAD_CHECK(records.size() <= texts.size());
  DORAD_CHECK(std::equal(records.begin(), records.end(), texts.begin()));
  DORAD_CHECK(change == 0 || records.size() + 1 >= texts.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const File file;
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 3) {
    case 0:
      CheckFile(file, bytes);
      break;
    case 1:
      CheckRecord(bytes);
      break;
    default:
      CheckDamage(file, bytes);
  }
  return 0;
}
