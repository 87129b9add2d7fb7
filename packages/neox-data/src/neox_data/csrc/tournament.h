// Part of native.cpp: the order of a blend of thousands of datasets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

// Finds the dataset furthest behind with a tournament tree that re-evaluates a match only if its outcome may have
// changed: logarithmic in the number of different weights, for thousands of datasets.
//
// Datasets of the same weight take turns, so each weight is one player. A match stores the first item at which the
// loser could be ahead, with the worst rounding; until then its winner is unchanged.
class Tournament {
 public:
  Tournament(const double* weights, int64_t num_datasets) {
    std::vector<int64_t> by_weight(num_datasets);
    std::iota(by_weight.begin(), by_weight.end(), 0);
    std::stable_sort(by_weight.begin(), by_weight.end(),
                     [weights](int64_t a, int64_t b) { return weights[a] > weights[b]; });
    for (int64_t j : by_weight) {
      if (players_.empty() || players_.back().weight != weights[j]) players_.push_back({weights[j], 0.0, 0, {}});
      players_.back().members.push_back(j);
    }
    while (num_leaves_ < static_cast<int64_t>(players_.size())) num_leaves_ *= 2;
    matches_.assign(2 * num_leaves_, {-1, kNever, 0});
    for (int64_t leaf = 0; leaf < num_leaves_; ++leaf) {
      matches_[num_leaves_ + leaf].next = kNever;
      if (leaf < static_cast<int64_t>(players_.size())) matches_[num_leaves_ + leaf].winner = leaf;
    }
  }

  template <typename T>
  void run(T* order, int64_t first, int64_t last, int64_t* taken) {
    for (int64_t k = first; k < last; ++k) {
      refresh(1, k);
      int64_t winner = matches_[1].winner;
      Player& player = players_[winner];
      int64_t furthest = player.front();
      if (++player.turn == static_cast<int64_t>(player.members.size())) {
        player.turn = 0;
        player.taken += 1;
      }
      for (int64_t match = (num_leaves_ + winner) / 2; match > 0; match /= 2) matches_[match].next = 0;
      ++taken[furthest];
      order[k] = static_cast<T>(furthest);
    }
  }

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  static constexpr double kRounding = 0x1p-50;

  // All datasets of one weight. The next one is the first that was taken once less often than the others.
  struct Player {
    double weight, taken;
    int64_t turn;
    std::vector<int64_t> members;
    int64_t front() const { return members[turn]; }
  };

  // `fails`: first item at which this match must be re-evaluated; `next`: the minimum over this match and its subtree.
  struct Match {
    int64_t winner, fails, next;
  };

  void refresh(int64_t match, int64_t k) {
    if (matches_[match].next > k) return;
    refresh(2 * match, k);
    refresh(2 * match + 1, k);
    play(match, k);
  }

  void play(int64_t match, int64_t k) {
    const Match &left = matches_[2 * match], &right = matches_[2 * match + 1];
    int64_t fails = kNever, winner = left.winner;
    if (right.winner >= 0) {
      bool left_wins = is_ahead(players_[left.winner], players_[right.winner], k);
      winner = left_wins ? left.winner : right.winner;
      fails = first_doubt(players_[winner], players_[left_wins ? right.winner : left.winner], k);
    }
    matches_[match] = {winner, fails, std::min({fails, left.next, right.next})};
  }

  static bool is_ahead(const Player& a, const Player& b, int64_t k) {
    double items = static_cast<double>(std::max<int64_t>(k, 1));
    double deficit_a = a.weight * items - a.taken, deficit_b = b.weight * items - b.taken;
    return deficit_a != deficit_b ? deficit_a > deficit_b : a.front() < b.front();
  }

  // The first item after k for which the computed deficit of `winner` may not be above that of `loser`.
  static int64_t first_doubt(const Player& winner, const Player& loser, int64_t k) {
    double closing = loser.weight - winner.weight + kRounding * (winner.weight + loser.weight);
    double lead = loser.taken - winner.taken - kRounding * (winner.taken + loser.taken);
    if (closing > 0) {
      double doubt = lead / closing * (1 - kRounding);
      return doubt >= 0x1p62 ? kNever : std::max(k + 1, static_cast<int64_t>(std::floor(doubt)));
    }
    return lead > 0 || static_cast<double>(k) * -closing > -lead * (1 + kRounding) ? kNever : k + 1;
  }

  std::vector<Player> players_;
  std::vector<Match> matches_;
  int64_t num_leaves_ = 1;
};

// Fills `order`, and the number of items taken from each dataset before each block.
template <typename T>
void blend_by_tournament(const double* weights, int64_t num_datasets, T* order, int64_t num_items,
                         int64_t* taken_before, int64_t block) {
  Tournament furthest(weights, num_datasets);
  std::vector<int64_t> taken(num_datasets, 0);
  for (int64_t first = 0; first <= num_items; first += block, taken_before += num_datasets) {
    std::copy(taken.begin(), taken.end(), taken_before);
    furthest.run(order, first, std::min(first + block, num_items), taken.data());
  }
}
