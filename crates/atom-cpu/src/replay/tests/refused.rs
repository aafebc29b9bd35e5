//! Recordings that don't fit.

use super::*;
use crate::matmul::tests::random_tensor;
use atom_ops::{ExpertSpec, RouteSpec};

const SHAPE: StepShape = StepShape { rows: 4, out_rows: 1, lanes: 2 };

/// What is loaded: vectors of 16 and 48, a matrix, gate and up of 3 experts, down of 3 and of 2.
const VECTOR: Weight = Weight(0);
const LONG_VECTOR: Weight = Weight(1);
const MATRIX: Weight = Weight(2);
const GATE_UP: Weight = Weight(3);
const DOWN: Weight = Weight(4);
const TWO_DOWN: Weight = Weight(5);

fn backend() -> CpuBackend {
    let mut backend = CpuBackend::new(options(1, Isa::detect(), Activations::Int8)).unwrap();
    let slice = |rows, cols| whole(&random_tensor(DType::F32, rows, cols, 1));
    let experts = |count, rows, cols| vec![vec![slice(rows, cols)]; count];
    assert_eq!(backend.load_vector(&[slice(1, 16)]).unwrap(), VECTOR);
    assert_eq!(backend.load_vector(&[slice(1, 48)]).unwrap(), LONG_VECTOR);
    assert_eq!(backend.load_matrix(&[slice(8, 32)]).unwrap(), MATRIX);
    assert_eq!(backend.load_experts(&experts(3, 2 * 24, 32)).unwrap(), GATE_UP);
    assert_eq!(backend.load_experts(&experts(3, 32, 24)).unwrap(), DOWN);
    assert_eq!(backend.load_experts(&experts(2, 32, 24)).unwrap(), TWO_DOWN);
    backend.reserve(&reserve(SHAPE)).unwrap();
    backend
}

fn route_spec() -> RouteSpec {
    RouteSpec {
        experts: 16,
        top_k: 2,
        is_sigmoid: false,
        groups: 4,
        groups_kept: 2,
        normalise: false,
        scale: 1.0,
    }
}

fn record_experts(ops: &mut Ops, weights: (Weight, Weight), hidden: usize, spec: ExpertSpec, extent: Extent) {
    let (x, routes) = (ops.buffer(extent, hidden), ops.buffer(extent, 2 * spec.top_k));
    let places = spec.choices_per_row();
    let inner = ops.buffer(extent, places * 2 * spec.width);
    let gated = ops.buffer(extent, places * spec.width);
    let out = ops.buffer(extent, hidden);
    ops.expert_sums((x, routes), weights, &Arc::new(spec), (inner, gated), out);
}

#[test]
fn recordings_that_do_not_fit_are_refused_with_the_numbers() {
    let mut backend = backend();
    let mut check = |expected: &str, record: &dyn Fn(&mut Ops)| {
        let mut ops = Ops::new(SHAPE);
        record(&mut ops);
        let error = backend.record(ops.finish()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error:?} should say {expected:?}");
    };
    let rows = |ops: &mut Ops, width| ops.buffer(Extent::Rows, width);
    let scale = |ops: &mut Ops, width, weights, elements| {
        let (qkv, sums) = (rows(ops, width), rows(ops, 2));
        ops.scale_heads(qkv, &attention(), sums, weights, elements, 1e-6);
    };
    check("81 elements of q, k and v, not 80", &|ops| {
        let (qkv, sums) = (rows(ops, 81), rows(ops, 2));
        ops.square_sums(qkv, &attention(), sums);
    });
    check("81 elements of q, k and v, not 80", &|ops| scale(ops, 81, (LONG_VECTOR, VECTOR), (48, 16)));
    check("16 elements of a vector, not 48", &|ops| scale(ops, 80, (VECTOR, VECTOR), (48, 16)));
    check("48 elements of a vector, not 16", &|ops| scale(ops, 80, (LONG_VECTOR, LONG_VECTOR), (48, 16)));
    check("mean over (48, 0)", &|ops| scale(ops, 80, (LONG_VECTOR, VECTOR), (48, 0)));
    check("both read and written", &|ops| {
        let x = rows(ops, 4);
        ops.add(x, x);
    });

    let route = |ops: &mut Ops, bias, spec: RouteSpec| {
        let (logits, out) = (rows(ops, spec.experts), rows(ops, 2 * spec.top_k));
        ops.route(logits, bias, &Arc::new(spec), out);
    };
    check("48 elements of a vector, not 16", &|ops| route(ops, Some(LONG_VECTOR), route_spec()));
    check("16 experts in 3 groups", &|ops| route(ops, None, RouteSpec { groups: 3, ..route_spec() }));
    check("16 experts in 0 groups", &|ops| route(ops, None, RouteSpec { groups: 0, ..route_spec() }));
    check("5 of 4 groups", &|ops| route(ops, None, RouteSpec { groups_kept: 5, ..route_spec() }));
    check("9 experts to choose of 8", &|ops| route(ops, None, RouteSpec { top_k: 9, ..route_spec() }));

    let spec = || ExpertSpec { top_k: 2, first: 0, held: 3, width: 24 };
    let rows_extent = Extent::Rows;
    check("is no layer's experts", &|ops| record_experts(ops, (MATRIX, DOWN), 32, spec(), rows_extent));
    check("2 experts with down, not 3", &|ops| {
        record_experts(ops, (GATE_UP, TWO_DOWN), 32, spec(), rows_extent)
    });
    check("3 experts with gate and up, not 2", &|ops| {
        record_experts(ops, (GATE_UP, DOWN), 32, ExpertSpec { held: 2, ..spec() }, rows_extent);
    });
    check("32 inputs of gate and up, not 64", &|ops| {
        record_experts(ops, (GATE_UP, DOWN), 64, spec(), rows_extent)
    });
    check("48 outputs of gate and up, not 46", &|ops| {
        record_experts(ops, (GATE_UP, DOWN), 32, ExpertSpec { width: 23, ..spec() }, rows_extent);
    });
    check("OutRows", &|ops| record_experts(ops, (GATE_UP, DOWN), 32, spec(), Extent::OutRows));
    check("is no matrix", &|ops| {
        let (x, out) = (rows(ops, 32), rows(ops, 48));
        ops.linear(x, GATE_UP, None, out);
    });

    let dispatch = |ops: &mut Ops, owners: [usize; 3]| {
        let (x, routes) = (rows(ops, 32), ops.buffer(Extent::GroupRows, 4));
        let out = ops.buffer(Extent::GroupRows, 32);
        ops.dispatch_rows(x, routes, &Arc::from(owners), out);
    };
    check("one behind the other", &|ops| dispatch(ops, [0, 5, 4]));
    check("one behind the other", &|ops| dispatch(ops, [1, 2, 4]));
}
