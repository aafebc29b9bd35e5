//! A function for each operator's kernels: argument lists and grids, next to nothing else.
//!
//! Grids come from capacities and the GPU only. A capture fixes them, so they must not depend on a step.

pub mod attend;
pub mod attend_few;
pub mod exchange;
pub mod experts;
pub mod linear_fp8;
pub mod linear_gated;
pub mod linear_rows;
mod linear_rows_fp8;
pub mod linear_small;
pub mod norm;
pub mod quantise;
pub mod rope;
pub mod route;
pub mod router_few;
pub mod rows;
pub mod sample;
pub mod step;
