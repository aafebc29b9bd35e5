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
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

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
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
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
        })
    }
}

impl FromStr for Isa {
    type Err = OpsError;

    fn from_str(name: &str) -> Result<Self, OpsError> {
        Self::ALL.into_iter().find(|isa| isa.to_string() == name).ok_or_else(|| {
            OpsError::Device(format!("no instruction set is called {name:?}; use portable, avx2 or avx512"))
        })
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
