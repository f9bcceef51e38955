#include "server/adapter/residency/residency_lists.h"

#include <algorithm>

#include "server/platform/check.h"

namespace dorad::adapter {
namespace {

using Place = ResidencyRecord::Place;

bool UsedBefore(const ResidencyRecord& a, const ResidencyRecord& b) {
  return a.last_use < b.last_use;
}

bool ExpiresBefore(const ResidencyRecord& a, const ResidencyRecord& b) {
  return a.kept_until < b.kept_until;
}

}  // namespace

void RecordList::Insert(ResidencyRecord* record) {
  ListLink& link = record->*link_;
  DORAD_CHECK(link.list == nullptr);
  ResidencyRecord* before = last_;
  while (order_ != nullptr && before != nullptr && order_(*record, *before)) {
    before = (before->*link_).before;
  }
  ResidencyRecord* const after = before == nullptr ? first_ : (before->*link_).after;
  link = {this, before, after};
  (before == nullptr ? first_ : (before->*link_).after) = record;
  (after == nullptr ? last_ : (after->*link_).before) = record;
  Count(*record, 1);
}

bool RecordList::IsInOrder(const ResidencyRecord& record) const {
  if (order_ == nullptr) return true;
  const ListLink& link = record.*link_;
  return (link.before == nullptr || !order_(record, *link.before)) &&
         (link.after == nullptr || !order_(*link.after, record));
}

void RecordList::Remove(ResidencyRecord* record) {
  ListLink& link = record->*link_;
  DORAD_CHECK(link.list == this);
  (link.before == nullptr ? first_ : (link.before->*link_).after) = link.after;
  (link.after == nullptr ? last_ : (link.after->*link_).before) = link.before;
  link = {};
  Count(*record, -1);
}

void RecordList::Count(const ResidencyRecord& record, int64_t sign) {
  count_ += sign;
  permanent_ += record.permanent ? sign : 0;
  bytes_ += sign * record.bytes;
  stored_bytes_ += record.reload != nullptr ? sign * record.bytes : 0;
  host_copy_bytes_ += sign * record.host_copy_bytes;
}

std::vector<ResidencyRecord*> RecordList::all() const {
  std::vector<ResidencyRecord*> records;
  for (ResidencyRecord* record = first_; record != nullptr; record = After(record)) {
    records.push_back(record);
  }
  return records;
}

ResidencyLists::ResidencyLists()
    : permanent_(&ResidencyRecord::in_place, nullptr),
      in_use_(&ResidencyRecord::in_place, nullptr),
      kept_(&ResidencyRecord::in_place, ExpiresBefore),
      idle_stored_(&ResidencyRecord::in_place, UsedBefore),
      idle_hosted_(&ResidencyRecord::in_place, UsedBefore),
      evicting_(&ResidencyRecord::in_place, nullptr),
      away_(&ResidencyRecord::in_place, nullptr),
      loading_(&ResidencyRecord::in_place, nullptr),
      copies_of_residents_(&ResidencyRecord::in_copies, UsedBefore),
      copies_of_others_(&ResidencyRecord::in_copies, UsedBefore) {}

void ResidencyLists::Add(ResidencyRecord* record) {
  if (record->permanent) permanent_bytes_ += record->bytes;
  if (record->hosted_only()) {
    hosted_only_bytes_ += record->bytes;
    least_hosted_copy_ = std::min(least_hosted_copy_, record->host_copy_bytes);
    hosted_only_.insert(record);
  }
  Update(record);
}

void ResidencyLists::Destroy(ResidencyRecord* record) {
  record->destroyed = true;
  if (record->permanent) permanent_bytes_ -= record->bytes;
  if (hosted_only_.erase(record) > 0) hosted_only_bytes_ -= record->bytes;
  Update(record);
}

RecordList* ResidencyLists::PlaceOf(const ResidencyRecord& record) {
  switch (record.place) {
    case Place::kEvicting:
      return &evicting_;
    case Place::kLoading:
      return &loading_;
    case Place::kAway:
      return record.destroyed ? nullptr : &away_;
    case Place::kResident:
      break;
  }
  if (record.destroyed) return nullptr;
  if (record.permanent) return &permanent_;
  if (record.pins > 0) return &in_use_;
  if (record.kept_until != absl::InfinitePast()) return &kept_;
  return record.reload != nullptr ? &idle_stored_ : &idle_hosted_;
}

// What is on its way back keeps its copy; so does what nothing else brings back.
RecordList* ResidencyLists::CopiesOf(const ResidencyRecord& record) {
  if (record.host_copy == nullptr || record.destroyed || record.place == Place::kLoading) {
    return nullptr;
  }
  if (record.place == Place::kResident) return &copies_of_residents_;
  return record.reload != nullptr ? &copies_of_others_ : nullptr;
}

void ResidencyLists::Move(ResidencyRecord* record, ListLink ResidencyRecord::*link,
                          RecordList* to) {
  RecordList* const from = (record->*link).list;
  if (from == to && (to == nullptr || to->IsInOrder(*record))) return;
  if (from != nullptr) from->Remove(record);
  if (to != nullptr) to->Insert(record);
}

void ResidencyLists::Update(ResidencyRecord* record) {
  Move(record, &ResidencyRecord::in_place, PlaceOf(*record));
  Move(record, &ResidencyRecord::in_copies, CopiesOf(*record));
}

void ResidencyLists::ExpireKept(absl::Time now, uint64_t* clock) {
  while (kept_.first() != nullptr && kept_.first()->kept_until <= now) {
    ResidencyRecord* const record = kept_.first();
    record->kept_until = absl::InfinitePast();
    record->last_use = ++*clock;
    Update(record);
  }
}

int64_t ResidencyLists::bytes() const {
  int64_t bytes = 0;
  for (const RecordList* list :
       {&permanent_, &in_use_, &kept_, &idle_stored_, &idle_hosted_, &loading_}) {
    bytes += list->bytes();
  }
  return bytes;
}

int64_t ResidencyLists::resident() const {
  int64_t count = 0;
  for (const RecordList* list : {&permanent_, &in_use_, &kept_, &idle_stored_, &idle_hosted_}) {
    count += list->count();
  }
  return count;
}

int64_t ResidencyLists::droppable_bytes() const {
  return copies_of_residents_.host_copy_bytes() + copies_of_others_.host_copy_bytes();
}

ResidencyRecord* ResidencyLists::FirstDroppable(const ResidencyRecord* spared) const {
  for (const RecordList* list : {&copies_of_residents_, &copies_of_others_}) {
    ResidencyRecord* record = list->first();
    if (record != nullptr && record == spared) record = list->After(record);
    if (record != nullptr) return record;
  }
  return nullptr;
}

}  // namespace dorad::adapter
