// The arithmetic of a plan that is no stage: noise, sums of buffers, selects, guidance, copies of
// rows, narrowing to 16 bit. Knows: raw pointers and sizes. Doesn't know: plans, stages, streams.
//
// Compiled by NVRTC for the present architecture (compiler.py). Every kernel has a NumPy twin in
// sa3_runtime (twins.py says which). Sums of floats are spelled __fmul_rn and __fadd_rn, so that
// no multiply-add is fused and CPU and GPU agree to the bit. All kernels take grids of any size
// (grid-stride loops), none takes an atomic on a float.

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u64 first_index() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ u64 index_stride() { return (u64)gridDim.x * blockDim.x; }

// ---- noise ------------------------------------------------------------------------------------

static __device__ void philox4x32(u32 word[4], u32 key0, u32 key1) {
    for (int round = 0; round < 10; ++round) {
        u64 first = (u64)word[0] * 0xD2511F53u;
        u64 second = (u64)word[2] * 0xCD9E8D57u;
        u32 next0 = (u32)(second >> 32) ^ word[1] ^ key0;
        u32 next2 = (u32)(first >> 32) ^ word[3] ^ key1;
        word[0] = next0;
        word[1] = (u32)second;
        word[2] = next2;
        word[3] = (u32)first;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// out[c][f] = normal number e = f·channels + c of (seed, clip, draw); seed = {seed, clip}.
// One thread makes the four numbers of one counter, in float64, rounded once.
extern "C" __global__ void draw_noise(
    float* out, const u64* seed, u32 draw, u32 channels, u32 frames) {
    const u64 total = (u64)channels * frames, groups = (total + 3) / 4;
    const u32 per_frame = channels / 4;
    for (u64 i = first_index(); i < groups; i += index_stride()) {
        // neighbouring threads take neighbouring frames where a frame holds whole groups
        u64 group = channels % 4 == 0 ? (i % frames) * per_frame + i / frames : i;
        u32 word[4] = {(u32)group, draw, (u32)seed[1], 0};
        philox4x32(word, (u32)seed[0], (u32)(seed[0] >> 32));
        for (int pair = 0; pair < 2; ++pair) {
            double radius = sqrt(-2.0 * log(((word[2 * pair] >> 8) + 0.5) * 0x1p-24));
            double angle = 6.283185307179586 * (((word[2 * pair + 1] >> 8) + 0.5) * 0x1p-24);
            double normal[2] = {__dmul_rn(radius, cos(angle)), __dmul_rn(radius, sin(angle))};
            for (int k = 0; k < 2; ++k) {
                u64 e = 4 * group + 2 * pair + k;
                if (e < total) out[(e % channels) * frames + e / channels] = (float)normal[k];
            }
        }
    }
}

// The raw words, for known-answer tests: counter uint32 [n][4] in place, key of two words.
extern "C" __global__ void philox_words(u32* counter, u32 key0, u32 key1, u32 n) {
    for (u64 i = first_index(); i < n; i += index_stride())
        philox4x32(counter + 4 * i, key0, key1);
}

// ---- sums and selects -------------------------------------------------------------------------

// out = Σ coefficients[index]·buffer, left to right, up to four terms; out may be an operand.
extern "C" __global__ void combine(
    float* out, const float* coefficients, u32 count, u32 terms, u32 i0, const float* b0, u32 i1,
    const float* b1, u32 i2, const float* b2, u32 i3, const float* b3) {
    const float c0 = coefficients[i0];
    const float c1 = terms > 1 ? coefficients[i1] : 0.f;
    const float c2 = terms > 2 ? coefficients[i2] : 0.f;
    const float c3 = terms > 3 ? coefficients[i3] : 0.f;
    for (u64 i = first_index(); i < count; i += index_stride()) {
        float sum = __fmul_rn(c0, b0[i]);
        if (terms > 1) sum = __fadd_rn(sum, __fmul_rn(c1, b1[i]));
        if (terms > 2) sum = __fadd_rn(sum, __fmul_rn(c2, b2[i]));
        if (terms > 3) sum = __fadd_rn(sum, __fmul_rn(c3, b3[i]));
        out[i] = sum;
    }
}

// out[a][b] = mask ≠ 0 ? source[a][b] : otherwise[a][b], or 0 where otherwise is null.
// mask is [a] when by_row, else [b]. out may be source or otherwise.
extern "C" __global__ void choose(
    float* out, const float* source, const float* otherwise, const float* mask, u32 rows,
    u32 columns, u32 by_row) {
    const u64 total = (u64)rows * columns;
    for (u64 i = first_index(); i < total; i += index_stride()) {
        bool keep = mask[by_row ? i / columns : i % columns] != 0.f;
        out[i] = keep ? source[i] : otherwise ? otherwise[i] : 0.f;
    }
}

// ---- copies -----------------------------------------------------------------------------------

// target[r][i] = source[r][i] for rows of `words` 32-bit words that lie apart by the strides.
extern "C" __global__ void copy_rows(
    u32* target, const u32* source, u32 rows, u32 words, u64 target_stride, u64 source_stride) {
    const u64 total = (u64)rows * words;
    for (u64 i = first_index(); i < total; i += index_stride()) {
        u64 row = i / words, word = i % words;
        target[row * target_stride + word] = source[row * source_stride + word];
    }
}

// out[i] = clamp(pcm[i], ±32767); status += how many were outside (an integer sum: any order).
extern "C" __global__ void narrow(short* out, const int* pcm, int* status, u32 count) {
    int outside = 0;
    for (u64 i = first_index(); i < count; i += index_stride()) {
        int value = pcm[i];
        int clamped = value > 32767 ? 32767 : value < -32767 ? -32767 : value;
        outside += clamped != value;
        out[i] = (short)clamped;
    }
    if (outside) atomicAdd(status, outside);
}

// Tells the host how far the graph is: `counter` lies in page-locked memory.
extern "C" __global__ void tick(volatile u32* counter, u32 value) { *counter = value; }

// ---- guidance ---------------------------------------------------------------------------------

#define GUIDE_BLOCKS 128
#define GUIDE_THREADS 256

// The two sums of `partials` (double [GUIDE_BLOCKS][2]), in one fixed order.
static __device__ double2 sum_of_partials(const double* partials) {
    double2 sum = {0, 0};
    for (int block = 0; block < GUIDE_BLOCKS; ++block) {
        sum.x = __dadd_rn(sum.x, partials[2 * block]);
        sum.y = __dadd_rn(sum.y, partials[2 * block + 1]);
    }
    return sum;
}

struct Estimates {
    float denoised, difference, valid;
};

static __device__ __forceinline__ Estimates estimates(
    const float* cond, const float* uncond, const float* x, const float* valid, float t, u64 i,
    u32 frame) {
    Estimates e;
    e.denoised = __fsub_rn(x[i], __fmul_rn(t, cond[i]));
    e.difference = __fsub_rn(e.denoised, __fsub_rn(x[i], __fmul_rn(t, uncond[i])));
    e.valid = valid ? valid[frame] : 1.f;
    return e;
}

// Pass 1: partials[block] = {Σ diff·Dc, Σ Dc·Dc} over valid frames, in float64.
extern "C" __global__ void __launch_bounds__(GUIDE_THREADS) guide_sums(
    double* partials, const float* coefficients, const float* cond, const float* uncond,
    const float* x, const float* valid, u32 t, u32 channels, u32 frames) {
    __shared__ double lane[2][GUIDE_THREADS];
    const u64 total = (u64)channels * frames;
    double along = 0, square = 0;
    for (u64 i = first_index(); i < total; i += index_stride()) {
        Estimates e = estimates(cond, uncond, x, valid, coefficients[t], i, (u32)(i % frames));
        double toward = __fmul_rn(e.difference, e.valid), direction = __fmul_rn(e.denoised, e.valid);
        along = __dadd_rn(along, __dmul_rn(toward, direction));
        square = __dadd_rn(square, __dmul_rn(direction, direction));
    }
    lane[0][threadIdx.x] = along;
    lane[1][threadIdx.x] = square;
    for (int half = GUIDE_THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            for (int k = 0; k < 2; ++k)
                lane[k][threadIdx.x] = __dadd_rn(lane[k][threadIdx.x], lane[k][threadIdx.x + half]);
    }
    if (threadIdx.x == 0)
        for (int k = 0; k < 2; ++k) partials[2 * blockIdx.x + k] = lane[k][0];
}

static __device__ __forceinline__ float guided(
    Estimates e, float x, float t, float scale, float apg, double share) {
    double toward = __fmul_rn(e.difference, e.valid), direction = __fmul_rn(e.denoised, e.valid);
    float orthogonal = (float)__dsub_rn(toward, __dmul_rn(share, direction));
    float used = __fadd_rn(
        __fmul_rn(apg, orthogonal), __fmul_rn(__fsub_rn(1.f, apg), e.difference));
    float estimate = __fadd_rn(e.denoised, __fmul_rn(__fsub_rn(scale, 1.f), used));
    return __fdiv_rn(__fsub_rn(x, estimate), t);
}

// Pass 2: out = guided velocity, then the std rescale over channels of each frame.
// Blocks of 32 frames × 8 channel lanes; out may be cond.
extern "C" __global__ void __launch_bounds__(GUIDE_THREADS) guide_apply(
    float* out, const double* partials, const float* coefficients, const float* cond,
    const float* uncond, const float* x, const float* valid, u32 t_index, u32 scale_index,
    u32 apg_index, u32 rescale_index, u32 channels, u32 frames) {
    __shared__ double2 sums, lane[8][32];
    const u32 column = threadIdx.x % 32, row = threadIdx.x / 32;
    const u32 frame = blockIdx.x * 32 + column;
    const bool inside = frame < frames;
    const float t = coefficients[t_index], scale = coefficients[scale_index];
    const float apg = coefficients[apg_index], rescale = coefficients[rescale_index];
    if (threadIdx.x == 0) sums = sum_of_partials(partials);
    __syncthreads();
    const double share = sums.y > 0 ? sums.x / sums.y : 0.0;

    float ratio = 1.f;
    if (rescale > 0.f) {
        double2 mean = {0, 0}, spread = {0, 0};
        for (int pass = 0; pass < 2; ++pass) {  // sums, then squares around the mean
            double2 own = {0, 0};
            for (u32 c = row; inside && c < channels; c += 8) {
                u64 i = (u64)c * frames + frame;
                Estimates e = estimates(cond, uncond, x, valid, t, i, frame);
                double a = cond[i], b = guided(e, x[i], t, scale, apg, share);
                own.x += pass ? (a - mean.x) * (a - mean.x) : a;
                own.y += pass ? (b - mean.y) * (b - mean.y) : b;
            }
            lane[row][column] = own;
            __syncthreads();
            double2 sum = {0, 0};
            for (int k = 0; k < 8; ++k) {
                sum.x += lane[k][column].x;
                sum.y += lane[k][column].y;
            }
            __syncthreads();
            double2* result = pass ? &spread : &mean;
            result->x = sum.x / channels;
            result->y = sum.y / channels;
        }
        ratio = __fdiv_rn((float)sqrt(spread.x), fmaxf((float)sqrt(spread.y), 1e-30f));
    }
    for (u32 c = row; inside && c < channels; c += 8) {
        u64 i = (u64)c * frames + frame;
        Estimates e = estimates(cond, uncond, x, valid, t, i, frame);
        float v = guided(e, x[i], t, scale, apg, share);
        if (rescale > 0.f)
            v = __fadd_rn(
                __fmul_rn(__fmul_rn(rescale, v), ratio), __fmul_rn(__fsub_rn(1.f, rescale), v));
        out[i] = v;
    }
}
