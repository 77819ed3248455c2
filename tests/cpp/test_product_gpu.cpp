// SPDX-License-Identifier: Apache-2.0
//
// The sm90 family's product kernel on the GPU: tiles, thread blocks of one to three warpgroups, several tiles of a
// block, and operands that are not finite. Skipped where there is no Hopper GPU.
#include "product_cases.hpp"

namespace convt3d {
namespace {

using test::Three;

struct Geometry {
  int64_t batch, in, out;
  Three size, kernel;
};
constexpr Three kHalves{2, 2, 2};

Problem problem(Geometry const& g) {
  return test::product_problem(g.batch, g.in, g.out, g.size, g.kernel, g.kernel, {}, {});
}

class Product : public test::ProductCases {
 protected:
  bool takes(Problem const& p) const override { return sm90::product::takes(p); }
};

// Positions that fill tiles, end within one, and lie in several; samples that end within a tile; kernels that differ
// by axis; a half of a warpgroup's columns.
TEST_P(Product, Tiles) {
  for (Geometry const& g : {Geometry{1, 32, 16, {4, 4, 4}, kHalves},
                            {3, 40, 24, {2, 4, 3}, kHalves},
                            {2, 8, 8, {1, 1, 8}, kHalves},
                            {1, 16, 40, {1, 1, 1}, kHalves},
                            {2, 72, 48, {8, 8, 8}, kHalves},
                            {5, 16, 32, {4, 6, 2}, {1, 2, 2}},
                            {2, 48, 16, {3, 5, 2}, {2, 4, 4}},
                            {1, 24, 64, {5, 3, 7}, {2, 1, 2}}}) {
    run(problem(g), static_cast<uint64_t>(g.in));
  }
}

// Input channels off the steps of products and off the sums of these.
TEST_P(Product, Channels) {
  for (int64_t in : {8, 64, 72, 128, 136, 256, 264, 1000}) run(problem({1, in, 16, {3, 4, 4}, kHalves}), 3);
}

// More tiles than thread blocks, so that x and the weight of the next come in beside the outputs of one: with fewer
// steps than stages, as many, and more.
TEST_P(Product, TilesOneAfterTheOther) {
  {
    struct Limit {
      Limit() { sm90::most_ctas = 2; }
      ~Limit() { sm90::most_ctas = INT_MAX; }
    } const limit;
    for (int64_t in : {16, 256, 320}) run(problem({3, in, 24, {4, 6, 8}, kHalves}), 4);
  }
  run(problem({3, 16, 96, {10, 12, 12}, kHalves}), 4);
}

TEST_P(Product, CopiedOperands) {
  for (Geometry const& g : {Geometry{1, 32, 16, {4, 4, 4}, kHalves},
                            {3, 37, 24, {2, 4, 3}, kHalves},
                            {2, 72, 48, {4, 8, 8}, kHalves},
                            {5, 16, 32, {4, 6, 2}, {1, 2, 2}},
                            {2, 48, 16, {3, 5, 2}, {2, 4, 4}}}) {
    run_copied_operands(problem(g), static_cast<uint64_t>(g.in));
    run_copied_operands(problem(g), static_cast<uint64_t>(g.in), test::nonfinite_draw);
  }
}

// Of whole tiles, and of none.
TEST_P(Product, Tails) {
  run_tails(problem({2, 40, 16, {3, 4, 32}, kHalves}), problem({2, 40, 16, {3, 4, 5}, kHalves}));
}

TEST_P(Product, OperandsOfOneSign) {
  for (int64_t in : {320, 2048}) run(problem({1, in, 16, {4, 4, 4}, kHalves}), 1, test::one_sign_draw);
}

// Only products that belong to an output may touch it, and infinities stay what fp32 makes of them.
TEST_P(Product, NonFiniteValues) { run_nonfinite_values(problem({2, 136, 24, {3, 4, 7}, kHalves})); }

TEST_P(Product, SlicesAndAccessesOfTwoChannels) { run_slices(problem({2, 16, 16, {4, 2, 4}, kHalves}), 48, 40); }

TEST_P(Product, AddOfChannels) { run_add_of_channels(problem({3, 40, 24, {2, 4, 3}, kHalves})); }

TEST_P(Product, WeightThatStartsAnywhere) { run_weight_that_starts_anywhere(problem({2, 40, 24, {4, 4, 4}, kHalves})); }

INSTANTIATE_TEST_SUITE_P(All, Product, testing::ValuesIn(test::kModes + 1, test::kModes + 4),
                         [](auto const& info) { return info.param.name; });

}  // namespace
}  // namespace convt3d
