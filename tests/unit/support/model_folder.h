// A temporary folder for one test.
#pragma once

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "server/platform/files/byte_buffer.h"
#include "tests/unit/support/test.h"

namespace dorad::model {

// Removed, with everything in it, by the destructor.
class ModelFolder {
 public:
  ModelFolder() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string(test->test_suite_name()) + "." + test->name();
    for (char& c : name) {
      if (c == '/') c = '_';
    }
    path_ = std::filesystem::path(testing::TempDir()) /
            ("dorad." + name + "." + std::to_string(getpid()));
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~ModelFolder() { std::filesystem::remove_all(path_); }
  ModelFolder(const ModelFolder&) = delete;
  ModelFolder& operator=(const ModelFolder&) = delete;

  std::string path() const { return path_.string(); }

  void Write(const std::string& file, const std::string& text) const {
    std::ofstream(path_ / file, std::ios::binary) << text;
  }
  void Write(const std::string& file, const nlohmann::json& document) const {
    Write(file, document.dump());
  }
  void Write(const std::string& file, const ByteBuffer& bytes) const {
    Write(file, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  void Remove(const std::string& file) const { std::filesystem::remove(path_ / file); }

 private:
  std::filesystem::path path_;
};

}  // namespace dorad::model
