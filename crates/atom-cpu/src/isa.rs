//! Which instructions the kernels use: found once at start, or asked for.

use atom_ops::OpsError;
use std::fmt;
use std::str::FromStr;

/// A set of kernels. All of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust: any processor.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI. A processor with AVX-512 but without VNNI is served by AVX2.
    Avx512,
    /// The same, and AMX with bf16: tiles for products of weights and activations of bf16.
    Amx,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    /// The fastest one that this processor has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|isa| isa.is_supported()).expect("portable runs anywhere")
    }

    /// True when this processor has the instructions.
    pub fn is_supported(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512.is_supported() && amx::is_allowed(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Amx => false,
        }
    }

    /// `wanted` if the processor has it, the fastest one if nothing is wanted.
    pub fn choose(wanted: Option<Self>) -> Result<Self, OpsError> {
        match wanted {
            None => Ok(Self::detect()),
            Some(isa) if isa.is_supported() => Ok(isa),
            Some(isa) => Err(OpsError::Device(format!(
                "this processor does not have the instructions of {isa}; the best it has is {}",
                Self::detect()
            ))),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        })
    }
}

impl FromStr for Isa {
    type Err = OpsError;

    fn from_str(name: &str) -> Result<Self, OpsError> {
        Self::ALL.into_iter().find(|isa| isa.to_string() == name).ok_or_else(|| {
            OpsError::Device(format!(
                "no instruction set is called {name:?}; use portable, avx2, avx512 or amx"
            ))
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::x86_64::__cpuid_count;
    use std::sync::OnceLock;

    /// True if the processor has tiles and bf16 products of them, and the system lets this process use them:
    /// it keeps 8 KiB more for each thread, and wants to be asked.
    pub(super) fn is_allowed() -> bool {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        *ALLOWED.get_or_init(|| {
            // Intel SDM, CPUID: leaf 7 is there on everything with AVX-512.
            let features = __cpuid_count(7, 0).edx;
            let (bf16, tile) = (features >> 22 & 1, features >> 24 & 1);
            bf16 == 1 && tile == 1 && ask()
        })
    }

    #[cfg(target_os = "linux")]
    fn ask() -> bool {
        use std::ffi::c_long;
        unsafe extern "C" {
            fn syscall(number: c_long, ...) -> c_long;
        }
        // `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`, Linux 5.16: for all threads of the process.
        const ARCH_PRCTL: c_long = 158;
        const REQUEST_PERMISSION: c_long = 0x1023;
        const TILE_DATA: c_long = 18;
        // SAFETY: numbers only; an older system knows no such request and says so.
        unsafe { syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn ask() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_unknown_ones_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        assert!("avx3".parse::<Isa>().unwrap_err().to_string().contains("avx3"));
    }

    #[test]
    fn a_wanted_set_is_taken_or_refused_but_never_replaced() {
        assert_eq!(Isa::choose(None).unwrap(), Isa::detect());
        for isa in Isa::ALL {
            match Isa::choose(Some(isa)) {
                Ok(chosen) => assert_eq!(chosen, isa),
                Err(error) => assert!(!isa.is_supported() && error.to_string().contains(&isa.to_string())),
            }
        }
    }
}
