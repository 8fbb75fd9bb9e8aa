use kvpool_client::{blocking::Client, *};
use kvpool_transport::Region;
use kvpool_types::{Key, Length};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
fn med(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}
fn time(n: usize, mut f: impl FnMut(usize)) -> f64 {
    med((0..n)
        .map(|i| {
            let t = Instant::now();
            f(i);
            t.elapsed().as_secs_f64() * 1e6
        })
        .collect())
}
fn main() {
    let arg: Vec<String> = std::env::args().collect();
    if arg[1] == "pong" {
        let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        println!("{}", l.local_addr().unwrap());
        let (mut s, _) = l.accept().unwrap();
        s.set_nodelay(true).unwrap();
        let mut b = [0; 1];
        while s.read_exact(&mut b).is_ok() {
            s.write_all(&b).unwrap();
        }
        return;
    }
    if arg[1] == "sink" {
        let l = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        println!("{}", l.local_addr().unwrap());
        loop {
            let (mut s, _) = l.accept().unwrap();
            std::thread::spawn(move || {
                s.set_nodelay(true).unwrap();
                let big = std::env::var("COLD").is_ok();
                let mut b = vec![1u8; if big { 512 << 20 } else { 1 << 20 }];
                let mut at = 0usize;
                let mut n = [0u8; 8];
                while s.read_exact(&mut n).is_ok() {
                    let mut left = u64::from_le_bytes(n);
                    while left > 0 {
                        let w = (left as usize).min(1 << 20);
                        if at + w > b.len() {
                            at = 0
                        }
                        let k = s.read(&mut b[at..at + w]).unwrap();
                        if big {
                            at += k;
                        }
                        if k == 0 {
                            return;
                        }
                        left -= k as u64;
                    }
                    s.write_all(&[1]).unwrap();
                }
            });
        }
    }
    if arg.get(2).is_some_and(|a| a == "bulk") {
        return bulk(&arg);
    }
    let mut child = std::process::Command::new("taskset")
        .args(["-c", "1"])
        .arg(&arg[0])
        .arg("pong")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(child.stdout.take().unwrap()),
        &mut line,
    )
    .unwrap();
    let mut pong = std::net::TcpStream::connect(line.trim()).unwrap();
    pong.set_nodelay(true).unwrap();
    let mk = |spin: u64, t| {
        Client::connect(Options {
            masters: vec![arg[1].clone()],
            spin: Duration::from_micros(spin),
            transport: t,
            ..Options::default()
        })
        .unwrap()
    };
    let shm = mk(0, TransportChoice::Shm);
    let tcp = mk(0, TransportChoice::Tcp);
    let spin = mk(50, TransportChoice::Shm);
    if arg.get(2).is_some_and(|a| a == "puts") {
        let small = Region::from(vec![7u8; 64]);
        let x = rand_id();
        for r in 0..5 {
            let b: Vec<_> = (0..200usize)
                .map(|i| {
                    (0..1024usize)
                        .map(|j| {
                            let mut d = [0u8; 32];
                            d[..8].copy_from_slice(
                                &(x ^ ((r * 1000 + i) * 1024 + j) as u64).to_le_bytes(),
                            );
                            d[8] = 1;
                            PutBlock::new(Key::from_digest(d), small.whole())
                        })
                        .collect::<Vec<_>>()
                })
                .collect();
            let mut b = b.into_iter();
            let c = if arg[3] == "tcp" { &tcp } else { &shm };
            let t = time(200, |_| {
                for r in c.batch_put(b.next().unwrap(), &PutOptions::default()) {
                    r.unwrap();
                }
            });
            println!("   puts 64B x1024: {t:.0} us {:.0}k/s", 1024e3 / t);
        }
        child.kill().ok();
        return;
    }
    let keys: Vec<Key> = (0..8192u32)
        .map(|i| {
            let mut d = [0u8; 32];
            d[..4].copy_from_slice(&(i.wrapping_mul(0x9E3779B9)).to_le_bytes());
            d[4..8].copy_from_slice(&std::process::id().to_le_bytes());
            Key::from_digest(d)
        })
        .collect();
    let buf = Region::from(vec![7u8; 4096]);
    let small = Region::from(vec![7u8; 64]);
    let put: Vec<PutBlock> = keys
        .iter()
        .map(|k| PutBlock::new(k.clone(), small.whole()))
        .collect();
    for r in shm.batch_put(put, &PutOptions::default()) {
        r.unwrap();
    }
    let big: Vec<Key> = (0..2000)
        .map(|i| Key::parse(&format!("big-{}-{i}", std::process::id())).unwrap())
        .collect();
    for k in &big {
        shm.put(k, vec![3; 4096]).unwrap();
    }
    let into = Region::allocate(Length(4096));
    for _ in 0..3 {
        let p = time(500, |_| {
            pong.write_all(&[1]).unwrap();
            pong.read_exact(&mut [0]).unwrap();
        });
        print!("pong {p:.1} |");
        for (n, c) in [("shm", &shm), ("spin", &spin)] {
            let one = time(500, |i| {
                c.exist(&keys[i..i + 1], Leasing::Lease).unwrap();
            });
            let k64 = time(300, |i| {
                c.exist(&keys[i..i + 64], Leasing::Lease).unwrap();
            });
            let k1024 = time(100, |i| {
                c.exist(&keys[i * 8..i * 8 + 1024], Leasing::Lease).unwrap();
            });
            let k8192 = time(30, |_| {
                c.exist(&keys, Leasing::Lease).unwrap();
            });
            let m = time(100, |i| {
                c.match_prefix(&keys[i * 8..i * 8 + 1024]).unwrap();
            });
            print!(
                " {n}: exist1 {one:.1} ({:.2}) 64 {k64:.1} ({:.2}) 1024 {k1024:.0} ({:.1}M/s) 8192 {k8192:.0} ({:.1}M/s) match {m:.0} |",
                one / p,
                k64 / p,
                1024. / k1024,
                8192. / k8192
            );
        }
        println!();
        for (n, c) in [("shm", &shm), ("tcp", &tcp)] {
            let get = |k: &Key| {
                let r = c.batch_get(
                    vec![GetBlock::new(k.clone(), into.whole())],
                    &GetOptions::default(),
                );
                assert!(matches!(r[0], Ok(Lookup::Hit { .. })), "{:?}", r);
            };
            let cold = time(300, |i| get(&big[i]));
            let hot = time(300, |i| get(&big[i]));
            let x = rand_id();
            let put = time(300, |i| {
                let k = Key::parse(&format!("p-{x}-{i}")).unwrap();
                let r = c.batch_put(vec![PutBlock::new(k, buf.whole())], &PutOptions::default());
                assert!(r[0].is_ok());
            });
            let view = if n == "shm" {
                time(300, |i| {
                    let v = c
                        .get_view(
                            &big[i],
                            &ViewOptions {
                                unverified: true,
                                ..ViewOptions::default()
                            },
                        )
                        .unwrap();
                    drop(v);
                })
            } else {
                0.
            };
            print!(
                "   {n}: get lookup {cold:.1} ({:.2}) cached {hot:.1} put {put:.1} ({:.2}) view {view:.1}",
                cold / p,
                put / p
            );
            c.remove(Remove::Keys(vec![]), false).ok();
            std::thread::sleep(Duration::from_millis(5200));
        }
        println!();
        let x = rand_id();
        let batch = |i: usize| {
            (0..1024usize)
                .map(|j| {
                    let mut d = [0u8; 32];
                    d[..8].copy_from_slice(&(x ^ (i * 1024 + j) as u64).to_le_bytes());
                    d[8] = 1;
                    PutBlock::new(Key::from_digest(d), small.whole())
                })
                .collect::<Vec<_>>()
        };
        let b: Vec<_> = (0..30).map(batch).collect();
        let mut b = b.into_iter();
        let t = time(30, |_| {
            for r in shm.batch_put(b.next().unwrap(), &PutOptions::default()) {
                r.unwrap();
            }
        });
        println!("   puts 64B x1024: {t:.0} us {:.0}k/s", 1024e3 / t);
    }
    child.kill().ok();
}
fn rand_id() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64
}

fn bulk(arg: &[String]) {
    let mut child = std::process::Command::new(&arg[0])
        .arg("sink")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(child.stdout.take().unwrap()),
        &mut line,
    )
    .unwrap();
    let mut streams: Vec<_> = (0..2)
        .map(|_| {
            let s = std::net::TcpStream::connect(line.trim()).unwrap();
            s.set_nodelay(true).unwrap();
            s
        })
        .collect();
    let total: u64 = 128 << 20;
    let bufs: Vec<Vec<u8>> = (0..2)
        .map(|_| {
            vec![
                1u8;
                if std::env::var("COLD").is_ok() {
                    512 << 20
                } else {
                    1 << 20
                }
            ]
        })
        .collect();
    let ats = [
        std::sync::atomic::AtomicUsize::new(0),
        std::sync::atomic::AtomicUsize::new(0),
    ];
    let mut bare = |n: usize| {
        let t = Instant::now();
        std::thread::scope(|sc| {
            for (s, (b, at)) in streams[..n].iter_mut().zip(bufs.iter().zip(&ats)) {
                sc.spawn(move || {
                    let mine = total / n as u64;
                    s.write_all(&mine.to_le_bytes()).unwrap();
                    for _ in 0..mine >> 20 {
                        let a =
                            at.fetch_add(1 << 20, std::sync::atomic::Ordering::Relaxed) % b.len();
                        s.write_all(&b[a..a + (1 << 20)]).unwrap();
                    }
                    s.read_exact(&mut [0]).unwrap();
                });
            }
        });
        total as f64 / t.elapsed().as_secs_f64() / 1e9
    };
    let t = if arg[3] == "tcp" {
        TransportChoice::Tcp
    } else {
        TransportChoice::Shm
    };
    let conns: usize = arg.get(4).map_or(4, |c| c.parse().unwrap());
    let c = Client::connect(Options {
        masters: vec![arg[1].clone()],
        transport: t,
        tcp_connections_per_node: conns,
        location_cache: 100000,
        ..Options::default()
    })
    .unwrap();
    let x = rand_id();
    let src = Region::from((0..total).map(|i| (i * 7 >> 3) as u8).collect::<Vec<u8>>());
    let dst = Region::from(vec![9u8; total as usize]);
    if let Some(mode) = arg.get(5) {
        let n = 128usize;
        let key = |i: usize| Key::parse(&format!("k-{x}-{i}")).unwrap();
        let put = |r: usize| {
            for ch in 0..4 {
                let blocks = (0..32)
                    .map(|i| {
                        PutBlock::new(
                            key(r * 128 + ch * 32 + i),
                            src.slice(
                                kvpool_types::Offset(((ch * 32 + i) as u64) << 20),
                                Length(1 << 20),
                            )
                            .unwrap(),
                        )
                    })
                    .collect();
                for o in c.batch_put(blocks, &PutOptions::default()) {
                    o.unwrap();
                }
            }
        };
        let get = || {
            for ch in 0..4 {
                let blocks = (0..32)
                    .map(|i| {
                        GetBlock::new(
                            key(ch * 32 + i),
                            dst.slice(
                                kvpool_types::Offset(((ch * 32 + i) as u64) << 20),
                                Length(1 << 20),
                            )
                            .unwrap(),
                        )
                    })
                    .collect();
                for o in c.batch_get(blocks, &GetOptions::default()) {
                    assert!(o.is_ok());
                }
            }
        };
        put(0);
        let t = Instant::now();
        let mut r = 1;
        while t.elapsed().as_secs() < 3 {
            if mode == "get" {
                get()
            } else if mode == "bare" {
                bare(2);
            } else {
                put(r);
                c.remove(
                    Remove::Keys((0..n).map(|i| key(r * 128 + i)).collect()),
                    true,
                )
                .unwrap();
            }
            r += 1;
        }
        println!(
            "{:.2} GB/s",
            (r - 1) as f64 * total as f64 / t.elapsed().as_secs_f64() / 1e9
        );
        child.kill().ok();
        return;
    }
    let shapes: [(&str, u64, usize, u64); 4] = [
        ("32x1M", 1 << 20, 32, 1 << 20),
        ("128x256K", 256 << 10, 128, 256 << 10),
        ("16x8M", 8 << 20, 16, 8 << 20),
        ("32x64x16K", 1 << 20, 32, 16 << 10),
    ];
    let a = vec![1u8; 512 << 20];
    let mut b = vec![2u8; 512 << 20];
    let mut at = 0usize;
    for (name, size, batch, piece) in shapes {
        let mut rows: Vec<[f64; 5]> = vec![];
        for r in 0..11 {
            let slices = |reg: &Region, i: u64| {
                (0..size / piece)
                    .map(|p| {
                        reg.slice(kvpool_types::Offset(i * size + p * piece), Length(piece))
                            .unwrap()
                    })
                    .collect::<Vec<_>>()
            };
            let n = total / size;
            let keys: Vec<Key> = (0..n)
                .map(|i| Key::parse(&format!("{name}-{x}-{r}-{i}")).unwrap())
                .collect();
            let l1 = bare(1);
            let l2 = bare(2);
            let tm = Instant::now();
            for _ in 0..(total as usize) / piece as usize {
                if at + piece as usize > a.len() {
                    at = 0
                }
                b[at..at + piece as usize].copy_from_slice(&a[at..at + piece as usize]);
                at += piece as usize;
            }
            std::hint::black_box(&b);
            let mem = total as f64 / tm.elapsed().as_secs_f64() / 1e9;
            let tp = Instant::now();
            for ch in 0..(n as usize) / batch {
                let blocks = (0..batch)
                    .map(|i| {
                        let i = ch * batch + i;
                        let mut p = PutBlock::new(keys[i].clone(), src.whole());
                        p.buffers = slices(&src, i as u64);
                        p
                    })
                    .collect();
                for o in c.batch_put(blocks, &PutOptions::default()) {
                    o.unwrap();
                }
            }
            let put = total as f64 / tp.elapsed().as_secs_f64() / 1e9;
            let tg = Instant::now();
            for ch in 0..(n as usize) / batch {
                let blocks = (0..batch)
                    .map(|i| {
                        let i = ch * batch + i;
                        let mut p = GetBlock::new(keys[i].clone(), dst.whole());
                        p.buffers = slices(&dst, i as u64);
                        p
                    })
                    .collect();
                for o in c.batch_get(blocks, &GetOptions::default()) {
                    assert!(matches!(o, Ok(Lookup::Hit { .. })), "{o:?}");
                }
            }
            let get = total as f64 / tg.elapsed().as_secs_f64() / 1e9;
            c.remove(Remove::Keys(keys), true).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            if r > 0 {
                rows.push([l1, l2, mem, put, get]);
            }
        }
        let m = |k: usize| med(rows.iter().map(|r| r[k]).collect());
        let ratio = |k: usize, l: usize| med(rows.iter().map(|r| r[k] / r[l]).collect());
        println!(
            "{name}: bare1 {:.2} bare2 {:.2} memcpy {:.2} | put {:.2} ({:.2} of bare2 {:.2} of bare1 {:.2} of memcpy) get {:.2} ({:.2} {:.2} {:.2})",
            m(0),
            m(1),
            m(2),
            m(3),
            ratio(3, 1),
            ratio(3, 0),
            ratio(3, 2),
            m(4),
            ratio(4, 1),
            ratio(4, 0),
            ratio(4, 2)
        );
    }
    child.kill().ok();
}
