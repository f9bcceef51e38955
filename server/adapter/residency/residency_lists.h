// Lists of all records of a Residency, with their sums, so that nothing is scanned under the lock
// that the engine's thread takes.
//
// A record is in exactly one of the lists by place, as its fields say:
//
//   kPermanent   resident, never goes for others' sake, in use or not
//   kInUse       resident, somebody uses it
//   kKept        resident, for somebody who asked and has not come yet; the first to expire first
//   kIdleStored  resident, may go, the store has it; the least recently used first
//   kIdleHosted  resident, may go if there is room for a host copy; the least recently used first
//   kEvicting    on its way out
//   kAway
//   kLoading     on its way back
//
// A host copy that can be dropped is in one of two more lists, the least recently used first:
//
//   of residents  its weights lose nothing by it
//   of others     the store has them
//
// Update moves a record to where it belongs; whoever has changed one of the fields calls it. Takes
// constant time, but for a record that is not the most recently used one of its new list: then the
// more recent ones are passed. A destroyed record leaves when no thread moves it any more.
//
// Owned by Residency::State and guarded by its lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "absl/time/time.h"
#include "server/adapter/residency/residency_record.h"

namespace dorad::adapter {

// A list of borrowed records, linked through one of their links.
class RecordList {
 public:
  using Link = ListLink ResidencyRecord::*;
  // Whether a belongs before b; nullptr: in the order in which they come.
  using Order = bool (*)(const ResidencyRecord& a, const ResidencyRecord& b);
  RecordList(Link link, Order order) : link_(link), order_(order) {}
  RecordList(const RecordList&) = delete;
  RecordList& operator=(const RecordList&) = delete;

  void Insert(ResidencyRecord* record);
  // REQUIRES: it is in this list.
  void Remove(ResidencyRecord* record);
  // Whether the record is where Insert would put it. REQUIRES: it is in this list.
  bool IsInOrder(const ResidencyRecord& record) const;

  ResidencyRecord* first() const { return first_; }
  ResidencyRecord* After(const ResidencyRecord* record) const { return (record->*link_).after; }
  std::vector<ResidencyRecord*> all() const;

  int64_t count() const { return count_; }
  int64_t permanent() const { return permanent_; }
  int64_t bytes() const { return bytes_; }
  int64_t stored_bytes() const { return stored_bytes_; }  // of what the store has
  int64_t host_copy_bytes() const { return host_copy_bytes_; }

 private:
  void Count(const ResidencyRecord& record, int64_t sign);

  const Link link_;
  const Order order_;
  ResidencyRecord* first_ = nullptr;
  ResidencyRecord* last_ = nullptr;
  int64_t count_ = 0;
  int64_t permanent_ = 0;
  int64_t bytes_ = 0;
  int64_t stored_bytes_ = 0;
  int64_t host_copy_bytes_ = 0;
};

class ResidencyLists {
 public:
  ResidencyLists();

  // A new record.
  void Add(ResidencyRecord* record);
  // The record's entry is gone: nothing is counted on for it.
  void Destroy(ResidencyRecord* record);
  // After a change of place, pins, last_use, kept_until, host_copy or destroyed.
  void Update(ResidencyRecord* record);
  // Records that are kept until `now` are kept no longer, which counts as the end of a use.
  void ExpireKept(absl::Time now, uint64_t* clock);

  const RecordList& permanent() const { return permanent_; }
  const RecordList& in_use() const { return in_use_; }
  const RecordList& kept() const { return kept_; }
  const RecordList& idle_stored() const { return idle_stored_; }
  const RecordList& idle_hosted() const { return idle_hosted_; }
  const RecordList& evicting() const { return evicting_; }
  const RecordList& away() const { return away_; }
  const RecordList& loading() const { return loading_; }
  const RecordList& copies_of_residents() const { return copies_of_residents_; }
  const RecordList& copies_of_others() const { return copies_of_others_; }

  // Of what is resident or loading.
  int64_t bytes() const;
  int64_t resident() const;
  // What could be dropped of host copies.
  int64_t droppable_bytes() const;
  // Whose copy is dropped first, but not that of `spared`; nullptr: there is none.
  ResidencyRecord* FirstDroppable(const ResidencyRecord* spared) const;

  // Wherever they are, but for destroyed ones:
  int64_t permanent_bytes() const { return permanent_bytes_; }
  int64_t hosted_only_bytes() const { return hosted_only_bytes_; }
  // No hosted-only record has ever had a smaller host copy.
  int64_t least_hosted_copy() const { return least_hosted_copy_; }
  struct LargerFirst {
    bool operator()(const ResidencyRecord* a, const ResidencyRecord* b) const {
      return a->bytes != b->bytes ? a->bytes > b->bytes : a < b;
    }
  };
  const std::set<const ResidencyRecord*, LargerFirst>& hosted_only() const { return hosted_only_; }

 private:
  RecordList* PlaceOf(const ResidencyRecord& record);
  RecordList* CopiesOf(const ResidencyRecord& record);
  static void Move(ResidencyRecord* record, ListLink ResidencyRecord::*link, RecordList* to);

  RecordList permanent_, in_use_, kept_, idle_stored_, idle_hosted_, evicting_, away_, loading_;
  RecordList copies_of_residents_, copies_of_others_;
  int64_t permanent_bytes_ = 0;
  int64_t hosted_only_bytes_ = 0;
  int64_t least_hosted_copy_ = ResidencyRecord::kNoHostMemory;
  std::set<const ResidencyRecord*, LargerFirst> hosted_only_;
};

}  // namespace dorad::adapter
