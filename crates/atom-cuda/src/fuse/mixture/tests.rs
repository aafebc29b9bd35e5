use super::*;
use crate::fuse::fuse_where;
use atom_ops::{Comm, ExpertSpec, Ops, StepShape};
use std::sync::Arc;

const WEIGHT: Weight = Weight(7);

fn h200() -> Properties {
    Properties {
        name: String::new(),
        capability: (9, 0),
        processors: 132,
        shared_bytes_max: 232_448,
        l2_bytes: 60 << 20,
    }
}

/// What a layer has beside its mixture.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    Nothing,
    /// Sums over ranks behind the experts.
    Ranks,
    /// Something that reads the router's logits as well.
    Reader,
}

fn layer(rows: usize, beside: Beside) -> Recording {
    let mut ops = Ops::new(StepShape { rows, out_rows: rows, lanes: 1 });
    let [residual, normed, projected] = [0; 3].map(|_| ops.buffer(Extent::Rows, 64));
    let (logits, routes) = (ops.buffer(Extent::Rows, 16), ops.buffer(Extent::Rows, 4));
    let (inner, gated) = (ops.buffer(Extent::Rows, 2 * 2 * 32), ops.buffer(Extent::Rows, 2 * 32));
    let route = Arc::new(RouteSpec {
        experts: 16,
        top_k: 2,
        is_sigmoid: false,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        scale: 1.0,
    });
    let experts = Arc::new(ExpertSpec { top_k: 2, first: 0, held: 16, width: 32 });
    ops.embed(WEIGHT, residual);
    ops.norm(residual, WEIGHT, 1e-6, normed);
    ops.linear(normed, WEIGHT, None, projected);
    ops.add_norm(residual, projected, WEIGHT, 1e-6, normed);
    ops.linear(normed, WEIGHT, None, logits);
    ops.route(logits, None, &route, routes);
    if beside == Beside::Reader {
        let other = ops.buffer(Extent::Rows, 16);
        ops.add(logits, other);
    }
    ops.expert_sums((normed, routes), (WEIGHT, WEIGHT), &experts, (inner, gated), projected);
    if beside == Beside::Ranks {
        ops.all_reduce(projected, Comm::Lane);
    }
    ops.add_norm(residual, projected, WEIGHT, 1e-6, normed);
    ops.linear(normed, WEIGHT, None, projected);
    ops.finish()
}

fn words(recording: &Recording, element: Element, products: bool) -> Vec<&'static str> {
    let properties = h200();
    let mixtures = Mixtures { recording, element, codes: &|_| None, properties: &properties };
    let steps = fuse_where(recording, element, |_| None, |_| products, Some(&mixtures));
    steps.iter().map(Step::name).collect()
}

#[test]
fn between_products_of_a_row_alone_stand_router_experts_and_an_addition() {
    let recording = layer(1, Beside::Nothing);
    let expected = ["embed", "norm", "linear", "router", "experts", "add and norm", "linear"];
    assert_eq!(words(&recording, Element::BF16, true), expected);
    let properties = h200();
    let mixtures =
        Mixtures { recording: &recording, element: Element::BF16, codes: &|_| None, properties: &properties };
    let steps = fuse_where(&recording, Element::BF16, |_| None, |_| true, Some(&mixtures));
    let Step::Router(routed) = steps[3] else { panic!("{steps:?}") };
    assert_eq!(routed.added, None, "the product in front has added it");
}

#[test]
fn many_rows_are_added_and_normed_where_they_are_combined() {
    let recording = layer(1024, Beside::Nothing);
    let expected = ["embed", "norm", "linear", "add and norm", "linear", "route", "experts", "linear"];
    assert_eq!(words(&recording, Element::BF16, false), expected);
    let properties = h200();
    let mixtures =
        Mixtures { recording: &recording, element: Element::BF16, codes: &|_| None, properties: &properties };
    let steps = fuse_where(&recording, Element::BF16, |_| None, |_| false, Some(&mixtures));
    assert!(matches!(steps[6], Step::Experts(_)), "{steps:?}");
    // Where products of few rows don't add, the router does.
    let expected = ["embed", "norm", "linear", "router", "experts", "add and norm", "linear"];
    assert_eq!(words(&layer(router_few::ROWS_MAX, Beside::Nothing), Element::BF16, false), expected);
}

#[test]
fn what_others_need_stays_as_it_was() {
    let apart = ["embed", "norm", "linear", "add and norm", "linear", "route", "experts", "all-reduce"];
    assert_eq!(words(&layer(1024, Beside::Ranks), Element::BF16, false)[..8], apart);
    let read = ["embed", "norm", "linear", "add and norm", "linear", "route", "add", "experts"];
    assert_eq!(words(&layer(4, Beside::Reader), Element::BF16, false)[..8], read);
    let recording = layer(4, Beside::Nothing);
    let whole: Vec<&str> = recording.ops().iter().map(Op::name).collect();
    assert_eq!(words(&recording, Element::F32, false), whole, "models in f32 have no such kernels");
}
