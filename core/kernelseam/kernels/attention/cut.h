// A list of work, items of places of which the first ITEM_COST stand for what an item takes beside its tiles, cut into parts for blocks.
#pragma once
#include "attention/sequences.h"

constexpr int ITEM_COST = Config::ITEM_COST;

// Spans of the list, each cut into `parts`, a block each, of which the first `more` take one place more than `each`, and the first of all
// `lead` more. Items that are alike, of one length, stay whole or are cut into equal parts, where that makes no part longer by more than a
// sixteenth or an item's cost: a block with parts of two items begins and ends twice. Else all is one span.
struct Cut {
  int total, blocks, span, parts, each = 1, more = 0, lead = 0;
  KS_DEVICE Cut(int total, int most_blocks, int items, int longest) : total(total), blocks(most_blocks), span(total), parts(most_blocks) {
    if (!total) return;
    if ((i64)longest * items == total) {
      const int even = total / blocks, together = divide_up(items, blocks), cuts = max_of(blocks / items, 1);
      const int places = total / items, longest = cuts > 1 ? divide_up(places - ITEM_COST, cuts) : together * places;
      if (longest <= even + max_of(even / 16, ITEM_COST)) {
        span = together * places, parts = cuts, blocks = divide_up(items, together) * cuts;
        lead = cuts > 1 ? ITEM_COST : 0;
      }
    }
    share();
  }
  KS_DEVICE void share() { each = (span - lead) / parts, more = span - lead - parts * each; }
  KS_DEVICE int begin(int block) const {
    const int before = block / parts, part = block - before * parts;
    return min_of(before * span + (part ? lead : 0) + part * each + min_of(part, more), total);
  }
  // The block that takes a place.
  KS_DEVICE int taker(int place) const {
    const int before = place / span, at = max_of(place - before * span - lead, 0), longer = more * (each + 1);
    return before * parts + (at < longer ? at / (each + 1) : more + (at - longer) / each);
  }
};
