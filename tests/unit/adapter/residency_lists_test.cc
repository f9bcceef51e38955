// The lists of a residency against a model that scans all records for every answer.
#include "server/adapter/residency/residency_lists.h"

#include "tests/unit/support/test.h"

namespace dorad::adapter {
namespace {

using Place = ResidencyRecord::Place;
using Records = std::vector<std::shared_ptr<ResidencyRecord>>;

struct Copy final : HostCopy {};

class ResidencyListsTest : public ::testing::Test {
 protected:
  ResidencyRecord* Add(int64_t bytes, bool stored, bool permanent) {
    auto record = std::make_shared<ResidencyRecord>();
    record->bytes = bytes;
    record->host_copy_bytes = (bytes + 9) / 10 * 10;
    if (stored) record->reload = [] { return absl::InternalError("nobody reloads"); };
    record->permanent = permanent;
    record->place = Place::kResident;
    record->last_use = ++clock_;
    lists_.Add(record.get());
    records_.push_back(std::move(record));
    return records_.back().get();
  }

  int64_t Sum(const std::function<bool(const ResidencyRecord&)>& counts,
              int64_t ResidencyRecord::*bytes = &ResidencyRecord::bytes) const {
    int64_t sum = 0;
    for (const auto& record : records_) sum += counts(*record) ? (*record).*bytes : 0;
    return sum;
  }

  // What a scan finds, the least recently used first.
  std::vector<ResidencyRecord*> Find(
      const std::function<bool(const ResidencyRecord&)>& counts) const {
    std::vector<ResidencyRecord*> found;
    for (const auto& record : records_) {
      if (counts(*record)) found.push_back(record.get());
    }
    std::sort(found.begin(), found.end(),
              [](const auto* a, const auto* b) { return a->last_use < b->last_use; });
    return found;
  }

  static bool IsIdle(const ResidencyRecord& r) {
    return !r.destroyed && r.place == Place::kResident && r.pins == 0 && !r.permanent &&
           r.kept_until == absl::InfinitePast();
  }
  static bool IsDroppable(const ResidencyRecord& r) {
    return !r.destroyed && r.host_copy != nullptr && r.place != Place::kLoading &&
           (r.reload != nullptr || r.place == Place::kResident);
  }

  void ExpectAsTheModelSays() const {
    const auto resident = [](const ResidencyRecord& r) {
      return !r.destroyed && r.place == Place::kResident;
    };
    EXPECT_EQ(lists_.bytes(), Sum([&](const ResidencyRecord& r) {
                return resident(r) || r.place == Place::kLoading;
              }));
    EXPECT_EQ(lists_.resident(), static_cast<int64_t>(Find(resident).size()));
    EXPECT_EQ(lists_.droppable_bytes(), Sum(IsDroppable, &ResidencyRecord::host_copy_bytes));
    EXPECT_EQ(lists_.permanent_bytes(),
              Sum([](const ResidencyRecord& r) { return !r.destroyed && r.permanent; }));
    EXPECT_EQ(lists_.hosted_only_bytes(),
              Sum([](const ResidencyRecord& r) { return !r.destroyed && r.hosted_only(); }));
    EXPECT_EQ(lists_.idle_stored().all(),
              Find([](const ResidencyRecord& r) { return IsIdle(r) && r.reload != nullptr; }));
    EXPECT_EQ(lists_.idle_hosted().all(),
              Find([](const ResidencyRecord& r) { return IsIdle(r) && r.reload == nullptr; }));
    EXPECT_THAT(lists_.in_use().all(),
                UnorderedElementsAreArray(Find([&](const ResidencyRecord& r) {
                  return resident(r) && !r.permanent && r.pins > 0;
                })));
    EXPECT_EQ(lists_.copies_of_residents().all(), Find([&](const ResidencyRecord& r) {
                return IsDroppable(r) && r.place == Place::kResident;
              }));
    EXPECT_EQ(lists_.copies_of_others().all(), Find([&](const ResidencyRecord& r) {
                return IsDroppable(r) && r.place != Place::kResident;
              }));
    // Each record is in exactly one list, and the sums are those of the members.
    size_t members = 0;
    for (const RecordList* list :
         {&lists_.permanent(), &lists_.in_use(), &lists_.kept(), &lists_.idle_stored(),
          &lists_.idle_hosted(), &lists_.evicting(), &lists_.away(), &lists_.loading()}) {
      int64_t bytes = 0, stored = 0, copies = 0, permanent = 0;
      for (const ResidencyRecord* record : list->all()) {
        EXPECT_EQ(record->in_place.list, list);
        bytes += record->bytes;
        stored += record->reload != nullptr ? record->bytes : 0;
        copies += record->host_copy_bytes;
        permanent += record->permanent;
        ++members;
      }
      EXPECT_EQ(list->count(), static_cast<int64_t>(list->all().size()));
      EXPECT_EQ(list->bytes(), bytes);
      EXPECT_EQ(list->stored_bytes(), stored);
      EXPECT_EQ(list->host_copy_bytes(), copies);
      EXPECT_EQ(list->permanent(), permanent);
    }
    const auto listed = Find([](const ResidencyRecord& r) {
      return !r.destroyed || r.place == Place::kEvicting || r.place == Place::kLoading;
    });
    EXPECT_EQ(members, listed.size());
  }

  ResidencyLists lists_;
  Records records_;
  uint64_t clock_ = 0;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(ResidencyListsTest, RandomChangesGiveWhatAScanGives) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    for (int step = 0; step < 400; ++step) {
      now_ += absl::Milliseconds(below(50));
      if (records_.size() < 5 || below(20) == 0) Add(1 + below(50), below(3) > 0, below(8) == 0);
      ResidencyRecord& record = *records_[below(static_cast<int>(records_.size()))];
      switch (below(7)) {
        case 0:
        case 1:  // begins or ends a use
          if (record.destroyed || record.place != Place::kResident) break;
          record.pins = record.pins > 0 && below(2) == 0 ? record.pins - 1 : record.pins + 1;
          record.last_use = ++clock_;
          record.kept_until = absl::InfinitePast();
          break;
        case 2:
          if (record.pins > 0) break;
          record.place = static_cast<Place>(below(4));
          if (record.place == Place::kResident && below(2) == 0) {
            record.kept_until = now_ + absl::Milliseconds(100);
          }
          break;
        case 3:
          record.kept_until = now_ + absl::Milliseconds(below(200));
          break;
        case 4:
          record.host_copy = below(2) == 0 ? std::make_unique<Copy>() : nullptr;
          break;
        case 5:
          lists_.ExpireKept(now_, &clock_);
          for (const auto& each : records_) {
            EXPECT_TRUE(each->place != Place::kResident || each->permanent || each->pins > 0 ||
                        each->destroyed || each->kept_until == absl::InfinitePast() ||
                        each->kept_until > now_);
          }
          break;
        default:
          if (record.pins == 0 && !record.destroyed && below(4) == 0) lists_.Destroy(&record);
      }
      lists_.Update(&record);
      ASSERT_NO_FATAL_FAILURE(ExpectAsTheModelSays());
      ASSERT_FALSE(HasFailure());
    }
    for (const auto& record : records_) {
      record->pins = 0;
      record->place = Place::kAway;
      if (!record->destroyed) lists_.Destroy(record.get());
      lists_.Update(record.get());
    }
    EXPECT_EQ(lists_.bytes() + lists_.permanent_bytes() + lists_.hosted_only_bytes(), 0);
    records_.clear();
  }
}

TEST_F(ResidencyListsTest, TheCopyOfAResidentIsDroppedFirst) {
  ResidencyRecord* const away = Add(10, /*stored=*/true, /*permanent=*/false);
  ResidencyRecord* const resident = Add(10, /*stored=*/true, /*permanent=*/false);
  ResidencyRecord* const hosted = Add(10, /*stored=*/false, /*permanent=*/false);
  away->place = hosted->place = Place::kAway;
  for (ResidencyRecord* record : {away, resident, hosted}) {
    record->host_copy = std::make_unique<Copy>();
    lists_.Update(record);
  }
  EXPECT_EQ(lists_.FirstDroppable(nullptr), resident);
  EXPECT_EQ(lists_.FirstDroppable(resident), away);
  resident->host_copy = nullptr;
  lists_.Update(resident);
  EXPECT_EQ(lists_.FirstDroppable(away), nullptr) << "nothing else brings the third one back";
}

}  // namespace
}  // namespace dorad::adapter
