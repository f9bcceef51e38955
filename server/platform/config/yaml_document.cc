#include "server/platform/config/yaml_document.h"

#include <sstream>

#include "yaml-cpp/eventhandler.h"

namespace dorad {
namespace {

// Notes the position of the last document.
class DocumentMarks : public YAML::EventHandler {
 public:
  YAML::Mark last;

  void OnDocumentStart(const YAML::Mark& mark) override { last = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

}  // namespace

YAML::Node LoadYamlDocument(const std::string& text) {
  // yaml-cpp takes a stray token (",", "]") for an empty document without advancing: Load ignores
  // the rest of the text, LoadAll makes documents until memory ends. So look for a second document,
  // and never further.
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentMarks marks;
  if (parser.HandleNextDocument(marks) && parser.HandleNextDocument(marks)) {
    throw YAML::ParserException(marks.last, "a second document, or text outside the document");
  }
  return YAML::Load(text);
}

}  // namespace dorad
