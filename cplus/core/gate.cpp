// The gate on the CPU in one pass over memory, formulas as in kernels.py; built and loaded by native.py.
//
// Plain loops over blocks that stay in the L1 cache; the compiler vectorises them for any width. Products and sums are
// not contracted (-ffp-contract=off), so a result depends neither on the vector width nor on the number of threads.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// Use the threads of the OpenMP runtime that torch has loaded: a second runtime would start its own threads, and they
// would compete with the first runtime's waiting threads for the processors.
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);

namespace {

constexpr int64_t BLOCK = 128;      // coordinates computed at a time
constexpr int64_t SHARE = 1 << 17;  // coordinates a thread takes at a time

template <class To, class From> inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// a / b by the reciprocal of b where the processor has fused multiply-add: three operations instead of a slow division.
// Source: Markstein 1990; the result is correctly rounded, as in a division, because the reciprocal is.
struct Divisor {
    float b, inverse = 1.0f / b;
};
inline float operator/(float a, const Divisor& by) {
#ifdef __FMA__
    const float q = a * by.inverse;
    return __builtin_fmaf(__builtin_fmaf(-q, by.b, a), by.inverse, q);
#else
    return a / by.b;
#endif
}

// How an average is stored: `widen` and `narrow` convert between memory and float, `read` gives a number in [0, 1],
// `round` converts it back.
struct Nothing {  // beta = 0 needs no average
    using Kept = char;
};
struct Float32 {
    using Kept = float;
    static float read(float kept) { return kept; }
    static float round(float average) { return average; }
};
struct Bfloat16 {
    using Kept = uint16_t;
    static float widen(Kept kept) { return as<float>(uint32_t(kept) << 16); }
    static Kept narrow(float kept) { return Kept(as<uint32_t>(kept) >> 16); }
    static float read(float kept) { return kept; }
    static float round(float average) {  // to the nearest, halves to even
        const uint32_t bits = as<uint32_t>(average);
        return as<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    }
};
struct Uint8 {
    using Kept = uint8_t;
    static constexpr Divisor LEVELS{255.0f};
    static float widen(Kept kept) { return float(int32_t(kept)); }
    static Kept narrow(float kept) { return Kept(int32_t(kept)); }
    static float read(float kept) { return kept / LEVELS; }
    static float round(float average) { return (average * LEVELS.b + BARE) - BARE; }
    static constexpr float BARE = 1 << 23;  // floats from here on are integers: adding it rounds, halves to even
};

// from + weight * (to - from) with the weight clipped to [0, 1]; computed from the nearer end, as torch.lerp does, so
// that both ends are exact.
inline float lerp(float from, float to, float weight) {
    const bool near = weight < 0.5f;
    const float ahead = weight > 0.0f ? weight : 0.0f, back = weight < 1.0f ? weight - 1.0f : 0.0f;
    return (near ? from : to) + (near ? ahead : back) * (to - from);
}

struct Gate { float beta, rest; Divisor correction; };
struct Adam { float rest1, beta2, rest2, decay, step, root, eps; };

// Lines 10-13 of Algorithm 1 on a block; `applied` may be `theta` or `proposed`.
template <class Average>
inline void apply(int64_t here, const float* theta, const float* proposed, float* applied, const float* sign,
                  float* ema, const Gate k) {
#pragma omp simd
    for (int64_t i = 0; i < here; ++i) {
        const bool conflict = sign[i] * (proposed[i] - theta[i]) > 0.0f;
        if constexpr (std::is_same_v<Average, Nothing>) applied[i] = conflict ? theta[i] : proposed[i];
        else {
            const float kept = Average::round(k.beta * Average::read(ema[i]) + (conflict ? 0.0f : k.rest));
            ema[i] = kept;
            applied[i] = lerp(theta[i], proposed[i], Average::read(kept) / k.correction);
        }
    }
}

// The same with the average as it is stored in memory.
template <class Average>
inline void gated(int64_t here, const float* theta, const float* proposed, float* applied, const float* sign,
                  typename Average::Kept* ema, const Gate& k) {
    using Kept = typename Average::Kept;
    if constexpr (std::is_same_v<Kept, float>) apply<Average>(here, theta, proposed, applied, sign, ema, k);
    else if constexpr (std::is_same_v<Average, Nothing>) apply<Average>(here, theta, proposed, applied, sign, {}, k);
    else {
        float average[BLOCK];
        for (int64_t i = 0; i < here; ++i) average[i] = Average::widen(ema[i]);
        apply<Average>(here, theta, proposed, applied, sign, average, k);
        for (int64_t i = 0; i < here; ++i) ema[i] = Average::narrow(average[i]);
    }
}

// What AdamW proposes for a block, in the order of torch's fused kernel. Source: Loshchilov and Hutter 2019. Where the
// gradient is not finite, nothing is proposed and the moments are multiplied by 1: a conditional store would cost more.
inline void propose(int64_t here, const float* p, const float* g, float* m, float* v, float* proposed, const Adam k) {
#pragma omp simd
    for (int64_t i = 0; i < here; ++i) {
        const bool fine = std::fabs(g[i]) <= std::numeric_limits<float>::max();
        const float now = fine ? g[i] : m[i];
        const float first = lerp(m[i], now, k.rest1);
        const float second = (fine ? k.beta2 : 1.0f) * v[i] + (fine ? k.rest2 : 0.0f) * now * now;
        const float next = p[i] * k.decay - k.step * first / (std::sqrt(second) * k.root + k.eps);
        m[i] = first;
        v[i] = second;
        proposed[i] = fine ? next : p[i];
    }
}

// The signs of a byte: element k has code 0 for zero, 1 for plus, 2 for minus in bits 2k and 2k + 1.
struct Signs {
    float of[256][4] = {};
    constexpr Signs() {
        constexpr float signs[4] = {0.0f, 1.0f, -1.0f, 0.0f};
        for (int byte = 0; byte < 256; ++byte)
            for (int k = 0; k < 4; ++k) of[byte][k] = signs[byte >> 2 * k & 3];
    }
};
constexpr Signs SIGNS;

// Calls work(first, count, signs) for every block, on several threads in parallel.
template <class Work> struct Blocks {
    const int64_t count;
    const uint8_t* const packed;
    const Work work;
    std::atomic<int64_t> next{0};

    void run(int threads) {
        if (threads > 1 && GOMP_parallel) GOMP_parallel(share, this, threads, 0);
        else share(this);
    }

    // Each thread takes the next share until none is left, so that no thread waits for a slow one.
    static void share(void* blocks) {
        auto& own = *static_cast<Blocks*>(blocks);
        for (int64_t begin; (begin = own.next.fetch_add(SHARE)) < own.count;)
            for (int64_t first = begin; first < begin + SHARE && first < own.count; first += BLOCK) own.block(first);
    }

    void block(int64_t first) const {
        const int64_t here = count - first < BLOCK ? count - first : BLOCK;
        float signs[BLOCK];
        for (int64_t j = 0; 4 * j < here; ++j)
            std::memcpy(signs + 4 * j, SIGNS.of[packed[first / 4 + j]], 4 * sizeof(float));
        work(first, here, signs);
    }
};

template <class Average>
void gate(int64_t count, const float* theta, float* param, const uint8_t* packed, typename Average::Kept* ema,
          const float* k, int threads) {
    const auto work = [=, gate = Gate{k[0], k[1], {k[2]}}](int64_t first, int64_t here, const float* sign) {
        gated<Average>(here, theta + first, param + first, param + first, sign, ema + first, gate);
    };
    Blocks<decltype(work)>{count, packed, work}.run(threads);
}

template <class Average>
void adamw(int64_t count, float* param, const float* gradient, float* m, float* v, const uint8_t* packed,
           typename Average::Kept* ema, const float* k, int threads) {
    const Adam adam{k[0], k[1], k[2], k[3], k[4], k[5], k[6]};
    const auto work = [=, gate = Gate{k[7], k[8], {k[9]}}](int64_t first, int64_t here, const float* sign) {
        float proposed[BLOCK];
        propose(here, param + first, gradient + first, m + first, v + first, proposed, adam);
        gated<Average>(here, param + first, proposed, param + first, sign, ema + first, gate);
    };
    Blocks<decltype(work)>{count, packed, work}.run(threads);
}

}  // namespace

#define KERNELS(NAME, AVERAGE)                                                                                      \
    extern "C" void gate_##NAME(int64_t count, const float* theta, float* param, const uint8_t* packed,             \
                                AVERAGE::Kept* ema, const float* numbers, int threads) {                            \
        gate<AVERAGE>(count, theta, param, packed, ema, numbers, threads);                                          \
    }                                                                                                               \
    extern "C" void adamw_##NAME(int64_t count, float* param, const float* gradient, float* m, float* v,            \
                                 const uint8_t* packed, AVERAGE::Kept* ema, const float* numbers, int threads) {    \
        adamw<AVERAGE>(count, param, gradient, m, v, packed, ema, numbers, threads);                                \
    }

KERNELS(none, Nothing)
KERNELS(float32, Float32)
KERNELS(bfloat16, Bfloat16)
KERNELS(uint8, Uint8)
