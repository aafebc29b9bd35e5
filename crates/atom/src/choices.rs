//! What flags with a few words take.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    Auto,
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DTypeArg {
    Auto,
    #[value(alias = "bf16")]
    Bfloat16,
    #[value(alias = "f32")]
    Float32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvCacheDType {
    Auto,
    #[value(alias = "float32")]
    F32,
    #[value(aliases = ["float16", "half"])]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    /// e4m3.
    #[value(alias = "fp8_e4m3")]
    Fp8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum IsaArg {
    Portable,
    Avx2,
    Avx512,
    /// AVX-512, and AMX for bf16.
    Amx,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationsArg {
    Int8,
    Int16,
    Bf16,
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum DummyType {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8,
    #[value(name = "q4_0")]
    Q40,
    #[value(name = "q4_1")]
    Q41,
    #[value(name = "q5_0")]
    Q50,
    #[value(name = "q5_1")]
    Q51,
    #[value(name = "q4_k")]
    Q4K,
    #[value(name = "q5_k")]
    Q5K,
    #[value(name = "q6_k")]
    Q6K,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MoeExchangeArg {
    Auto,
    Gather,
    Dispatch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum LoadBalanceArg {
    Work,
    RoundRobin,
    LeastRequests,
    LeastTokens,
}
