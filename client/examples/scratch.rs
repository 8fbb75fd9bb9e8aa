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
