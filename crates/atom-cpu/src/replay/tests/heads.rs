//! Norms over all heads, sums, and the operator around routers.

use super::*;
use crate::replay::tests::meeting::Meeting;
use atom_ops::RouteSpec;

const ROWS: usize = 5;

#[test]
fn norms_over_all_heads_match_f64_and_have_the_bits_of_one_norm_on_every_set() {
    let spec = attention();
    let (q_width, k_width) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let heads = noise(1, ROWS, q_width + 2 * k_width);
    let (q_weight, k_weight) = (&noise(2, 1, q_width)[0], &noise(3, 1, k_width)[0]);
    let shape = StepShape { rows: ROWS + 1, out_rows: 1, lanes: 1 };
    for isa in supported() {
        for threads in [1, 3] {
            let mut backend = CpuBackend::new(options(threads, isa, Activations::Int8)).unwrap();
            let vector = |x: &[f32]| whole(&Tensor::from_f32(vec![x.len()], x.to_vec()));
            let weights = (
                backend.load_vector(&[vector(q_weight)]).unwrap(),
                backend.load_vector(&[vector(k_weight)]).unwrap(),
            );
            let all = table(&mut backend, &heads);
            let q = table(&mut backend, &heads.iter().map(|x| x[..q_width].to_vec()).collect::<Vec<_>>());
            backend.reserve(&reserve(shape)).unwrap();
            let mut ops = Ops::new(shape);
            let (qkv, sums) = (ops.buffer(Extent::Rows, q_width + 2 * k_width), ops.buffer(Extent::Rows, 2));
            let (alone, normed) = (ops.buffer(Extent::Rows, q_width), ops.buffer(Extent::Rows, q_width));
            ops.embed(all, qkv);
            ops.square_sums(qkv, &spec, sums);
            // Keys as one of two ranks has them: the other one's are twice as many.
            ops.scale_heads(qkv, &spec, sums, weights, (q_width, 3 * k_width), 1e-5);
            ops.embed(q, alone);
            ops.norm(alone, weights.0, 1e-5, normed);
            ops.add(alone, normed);
            let recorded = record(&mut backend, ops);
            let tokens: Vec<u32> = (0..ROWS as u32).collect();
            step(&mut backend, &recorded, &tokens, (&[ROWS as u32], 0), &Meeting::alone()).unwrap();
            let got = read(&mut backend, &recorded, qkv);
            let (sums, added) = (read(&mut backend, &recorded, sums), read(&mut backend, &recorded, normed));
            assert!(is_untouched(&got[ROWS]) && is_untouched(&sums[ROWS]), "padding was written");
            for (row, x) in heads.iter().enumerate() {
                let square = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
                let (q, k) = (&x[..q_width], &x[q_width..q_width + k_width]);
                let close = |got: f32, want: f64| {
                    assert!((f64::from(got) - want).abs() <= 1e-6 * want.abs().max(1.0), "{got}, not {want}");
                };
                close(sums[row][0], square(q));
                close(sums[row][1], square(k));
                let (q_scale, k_scale) = (
                    1.0 / (square(q) / q_width as f64 + 1e-5).sqrt(),
                    1.0 / (square(k) / (3 * k_width) as f64 + 1e-5).sqrt(),
                );
                for i in 0..q_width {
                    close(got[row][i], f64::from(q[i]) * q_scale * f64::from(q_weight[i]));
                    // The same bits as the norm, on which `add` put what it normed.
                    assert_eq!(added[row][i].to_bits(), (got[row][i] + q[i]).to_bits(), "{isa}");
                }
                for i in 0..k_width {
                    close(got[row][q_width + i], f64::from(k[i]) * k_scale * f64::from(k_weight[i]));
                }
                assert_eq!(got[row][q_width + k_width..], x[q_width + k_width..], "values stay");
            }
        }
    }
}

#[test]
fn rows_that_were_granted_but_do_not_run_choose_nobody() {
    let shape = StepShape { rows: 7, out_rows: 1, lanes: 1 };
    let spec = RouteSpec {
        experts: 8,
        top_k: 2,
        is_sigmoid: false,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        scale: 1.0,
    };
    for threads in [1, 3] {
        let mut backend = CpuBackend::new(options(threads, Isa::detect(), Activations::Int8)).unwrap();
        let logits = table(&mut backend, &noise(4, ROWS, 8));
        backend.reserve(&reserve(shape)).unwrap();
        let mut ops = Ops::new(shape);
        let (rows, routes) = (ops.buffer(Extent::Rows, 8), ops.buffer(Extent::Rows, 4));
        ops.embed(logits, rows);
        ops.route(rows, None, &Arc::new(spec.clone()), routes);
        ops.route(rows, None, &Arc::new(spec.clone()), routes);
        let recorded = record(&mut backend, ops);
        for rows in [0, 1, ROWS] {
            let tokens: Vec<u32> = (0..rows as u32).collect();
            step(&mut backend, &recorded, &tokens, (&[6], 0), &Meeting::alone()).unwrap();
            let routes = read(&mut backend, &recorded, routes);
            for route in &routes[..rows] {
                assert!(route[0] >= 0.0 && route[0] < route[1] && route[1] < 8.0, "{route:?}");
                assert!((route[2] + route[3] - 1.0).abs() < 1e-6, "{route:?}");
            }
            assert!(routes[rows..6].iter().all(|route| *route == [NO_EXPERT, NO_EXPERT, 0.0, 0.0]));
            assert!(is_untouched(&routes[6]), "padding was written");
            assert_eq!(backend.expert_rows().chosen, 2 * 2 * rows as u64, "two routers");
        }
    }
}

/// Two routers of different sizes, and what they choose computed here.
#[test]
fn different_experts_of_a_step_are_counted_when_somebody_asks() {
    let (few, many) = (70, 131);
    let logits = [noise(21, ROWS + 3, few), noise(22, ROWS + 3, many)];
    let chosen = |logits: &[Vec<f32>], top_k: usize| {
        let mut different = std::collections::BTreeSet::new();
        for row in logits {
            let mut order: Vec<usize> = (0..row.len()).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            different.extend(order.into_iter().take(top_k));
        }
        different.len() as u64
    };
    for threads in [1, 3] {
        let mut backend = CpuBackend::new(options(threads, Isa::Portable, Activations::Int8)).unwrap();
        let tables = [table(&mut backend, &logits[0]), table(&mut backend, &logits[1])];
        let shape = StepShape { rows: ROWS + 3, out_rows: 1, lanes: 1 };
        backend.reserve(&reserve(shape)).unwrap();
        let recordings = [true, false].map(|counts| {
            let mut ops = Ops::new(shape);
            for (table, (experts, top_k)) in tables.into_iter().zip([(few, 2), (many, 3)]) {
                let (logits, routes) =
                    (ops.buffer(Extent::Rows, experts), ops.buffer(Extent::Rows, 2 * top_k));
                ops.embed(table, logits);
                let (is_sigmoid, groups, groups_kept, normalise, scale) = (false, 1, 1, true, 1.0);
                let spec = RouteSpec { experts, top_k, is_sigmoid, groups, groups_kept, normalise, scale };
                ops.route(logits, None, &Arc::new(spec), routes);
            }
            let recording = ops.finish();
            let buffers = recording.buffers().to_vec();
            let recording = if counts { recording.counting_experts() } else { recording };
            Recorded { number: backend.record(recording).unwrap(), buffers }
        });
        let count = |backend: &mut CpuBackend, counts: usize, rows: usize| {
            let tokens: Vec<u32> = (0..rows as u32).collect();
            // Granted more than it runs: those choose nobody.
            let granted = [rows as u32 + 1];
            step(backend, &recordings[counts], &tokens, (&granted, 0), &Meeting::alone()).unwrap();
            backend.expert_rows().distinct
        };
        assert_eq!(count(&mut backend, 0, ROWS), 0, "nobody asked");
        backend.count_experts(true);
        for rows in [ROWS, 1, 3, ROWS + 2] {
            let expected = chosen(&logits[0][..rows], 2) + chosen(&logits[1][..rows], 3);
            assert_eq!(count(&mut backend, 0, rows), expected, "{rows} rows, {threads} threads");
        }
        assert_eq!(count(&mut backend, 1, ROWS), 0, "not made to count");
        backend.count_experts(false);
        assert_eq!(count(&mut backend, 0, ROWS), 0, "no longer");
    }
}
