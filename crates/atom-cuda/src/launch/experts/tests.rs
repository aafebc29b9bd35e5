use super::*;

fn gpu(capability: (i32, i32), shared_bytes_max: u32) -> Properties {
    Properties { name: String::new(), capability, processors: 132, shared_bytes_max, l2_bytes: 60 << 20 }
}

/// Qwen3-30B-A3B.
fn shape(rows: usize) -> ExpertsShape {
    let element = Element::BF16;
    ExpertsShape {
        lanes: 1,
        lane_rows: rows,
        top_k: 8,
        first: 0,
        held: 128,
        hidden: 2048,
        width: 768,
        element,
        fp8: None,
    }
}

#[test]
fn the_bucket_decides_which_kernels_run() {
    let h200 = gpu((9, 0), 232_448);
    let path = |rows| Experts::new(shape(rows), &h200).path();
    assert_eq!(path(1), ExpertsPath::Few { depths: [6, 6] });
    assert_eq!(path(32), ExpertsPath::Few { depths: [6, 6] });
    assert!(matches!(path(FEW_ROWS), ExpertsPath::Few { .. }));
    assert_eq!(path(FEW_ROWS + 1), ExpertsPath::Grouped { cluster: 1 });
    assert_eq!(path(8192), ExpertsPath::Grouped { cluster: 2 });
    let eight = |rows| Experts::new(ExpertsShape { held: 8, top_k: 2, ..shape(rows) }, &h200).path();
    assert!(matches!(eight(16), ExpertsPath::Few { .. }));
    assert_eq!(eight(64), ExpertsPath::Grouped { cluster: 1 }, "its experts have more than a tile each");
    let f32 = ExpertsShape { element: Element::F32, ..shape(1) };
    assert_eq!(Experts::new(f32, &h200).path(), ExpertsPath::Simple);
    let odd = ExpertsShape { width: 769, ..shape(1) };
    assert_eq!(Experts::new(odd, &h200).path(), ExpertsPath::Simple);
}

#[test]
fn kernels_fit_into_the_shared_memory_of_each_gpu() {
    for (capability, room) in [((8, 0), 166_912), ((8, 9), 101_376), ((9, 0), 232_448), ((12, 0), 101_376)] {
        for rows in [1, 8, FEW_ROWS, FEW_ROWS + 1, 256, 8192] {
            for (hidden, width) in [(64, 32), (2048, 768), (4096, 1536), (7168, 2048)] {
                let shape = ExpertsShape { hidden, width, ..shape(rows) };
                let used = match Experts::new(shape, &gpu(capability, room)).path() {
                    ExpertsPath::Simple => 0,
                    ExpertsPath::Few { depths } => few_shared(&shape, depths).into_iter().max().unwrap_or(0),
                    ExpertsPath::Small { row_tiles, depth } => {
                        stream_shared(row_tiles, depth, hidden.max(width))
                    }
                    ExpertsPath::Grouped { cluster } => {
                        assert_eq!(capability, (9, 0), "its instructions are of that capability only");
                        grouped_shared(cluster) as usize
                    }
                    path => panic!("{path:?} is of FP8"),
                };
                assert!(used <= room as usize, "{used} of {room} for {shape:?}");
            }
        }
    }
}

#[test]
fn parts_of_the_workspace_lie_apart() {
    let experts = Experts::by(shape(8192), ExpertsPath::Grouped { cluster: 2 });
    let w = experts.workspace();
    let choices = 8192 * 8;
    let parts = [
        (w.counts, 8),
        (w.tiles, 16 * (128 + choices / 320)),
        (w.slots, 4 * choices),
        (w.histogram, 4 * 32 * 128),
        (w.y, 2 * choices * 2048),
        (w.end, 0),
    ];
    for pair in parts.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
    }
    assert_eq!(Experts::by(shape(8), ExpertsPath::Simple).workspace_bytes(), 0);
}

#[test]
fn fp8_has_kernels_for_any_number_of_rows() {
    let h200 = gpu((9, 0), 232_448);
    for form in [Fp8Form::Channel, Fp8Form::Block] {
        let path = |rows| Experts::new(ExpertsShape { fp8: Some(form), ..shape(rows) }, &h200).path();
        for rows in [1, 64, 1024] {
            assert_eq!(path(rows), ExpertsPath::Fp8 { cluster: 1 });
        }
        assert_eq!(path(8192), ExpertsPath::Fp8 { cluster: 2 });
        // The driver keeps 1 KB of each block's.
        assert!(2 * (fp8::shared(form, 1) + 1024) <= 233_472, "two blocks fit on a multiprocessor");
        assert!(fp8::shared(form, 2) <= h200.shared_bytes_max);
    }
}

#[test]
fn quantised_inputs_of_fp8_have_their_own_room() {
    for (form, groups) in [(Fp8Form::Channel, [1, 1]), (Fp8Form::Block, [16, 6])] {
        for (rows, cluster, tile) in [(64, 1, 64), (8192, 2, 256)] {
            let shape = ExpertsShape { fp8: Some(form), ..shape(rows) };
            let experts = Experts::by(shape, ExpertsPath::Fp8 { cluster });
            let (w, choices) = (experts.workspace(), 8 * rows);
            let parts = [
                (w.counts, 8),
                (w.tiles, 16 * (128 + choices / tile)),
                (w.slots, 4 * choices),
                (w.histogram, 4 * rows.div_ceil(256) * 128),
                (w.y, 2 * choices * 2048),
                (w.x, rows * 2048 + 4 * groups[0] * rows),
                (w.gated, choices * 768 + 4 * groups[1] * choices),
                (w.end, 0),
            ];
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
        }
    }
}
