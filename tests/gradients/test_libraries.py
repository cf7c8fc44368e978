"Networks of transformers and adapters of peft as they come; without the libraries, skipped."
import pytest
import torch

from dp_course import (
    Examples,
    FlatClip,
    PrivacyPlan,
    Trainer,
    fast_grad_sum,
    ghost_grad_sum,
    load_release,
    loop_grad_sum,
)
from dp_course.gradients import isolation

transformers = pytest.importorskip("transformers")
asked = pytest.importorskip("transformers.utils.import_utils")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
             intermediate_size=32, max_position_embeddings=32)
STILL = dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
GPT2 = dict(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0,
            eos_token_id=0)


def bert(**options):
    config = transformers.BertConfig(**SIZES, num_labels=3, **options)
    return transformers.BertForSequenceClassification(config)


def gpt2(**options):
    still = dict(resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **still, **options))


def llama(**options):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, **options)
    return transformers.LlamaForCausalLM(config)


def vit(**options):
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8, num_labels=3, **STILL, **options))


def padded(b=4, t=9):
    "Words, some of them padded, and their mask."
    lengths = torch.tensor([t, 5, 7, t])[:b, None]
    mask = (torch.arange(t) < lengths).long()
    return {"input_ids": torch.randint(3, 60, (b, t))*mask, "attention_mask": mask}


def batch_for(make):
    y = torch.randint(0, 3, (4,))
    if make is vit:
        return {"pixel_values": torch.randn(4, 3, 16, 16).double(), "labels": y}, y
    x = padded()
    words = torch.where(x["attention_mask"] > 0, x["input_ids"], -100)
    return {**x, "labels": y if make is bert else words}, y


def off_the_loop(engine, model, x, y):
    args = model, lambda output, y: output.loss, x, y, FlatClip(.1)
    (sums, norms), (want, right) = engine(*args), loop_grad_sum(*args)
    return max((sums[name] - want[name]).abs().max() for name in want), (norms - right).abs().max()


@pytest.mark.parametrize("engine", [fast_grad_sum, ghost_grad_sum])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make, options", [
    (bert, STILL), (gpt2, {}), (llama, {}), (vit, {})], ids=["bert", "gpt2", "llama", "vit"])
def test_sums_are_those_of_the_loop(make, options, attention, engine):
    model = make(attn_implementation=attention, **options).double()
    assert max(off_the_loop(engine, model, *batch_for(make))) < 1e-12


def test_the_library_asks_as_before_afterwards(monkeypatch):
    "Also when the model fails; without the answer, the library stops at the mask."
    before, x = asked.is_fake_tensor, padded()
    model, args = bert(**STILL), (lambda output, y: output.loss, {**x, "labels": x["input_ids"]})
    with pytest.raises(Exception):
        fast_grad_sum(model, *args, x["input_ids"][:, 0], FlatClip(1.))
    assert asked.is_fake_tensor is before
    monkeypatch.setattr(isolation, "unreadable", isolation.warnings.catch_warnings)
    with pytest.raises(ValueError, match="masking_utils.py.*padding_mask"):
        off_the_loop(fast_grad_sum, model, *batch_for(bert))


def a_trainer(model, **options):
    torch.manual_seed(0)
    x = padded()
    data = Examples({name: v.repeat(10, 1) for name, v in x.items()}, torch.arange(40) % 3)
    plan = PrivacyPlan(n=40, batch_size=10, steps=2, eps=3, delta=1e-3)
    return Trainer(model, data, plan, seed=3, **options)


def weights_after(micro_batch):
    torch.manual_seed(0)
    return a_trainer(bert(), micro_batch=micro_batch).fit().model.state_dict()


def test_dropout_is_drawn_from_the_stream_of_the_run():
    one, two = weights_after(None), weights_after(None)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["lora.pt", "lora.safetensors"])
def test_adapters_alone_learn_and_a_release_is_read_again(tmp_path, name):
    peft = pytest.importorskip("peft")
    pytest.importorskip("safetensors")
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    run = a_trainer(peft.get_peft_model(bert(), settings)).fit()
    assert all("lora" in key or "classifier" in key for key in run.params)
    run.release(tmp_path/name)
    fresh = peft.get_peft_model(bert(), settings)
    assert load_release(tmp_path/name, fresh) == run.statement()
    one, two = (m.eval()(**padded()).logits for m in (fresh, run.model))
    assert one.shape == two.shape == (4, 3)
    assert all(map(torch.equal, fresh.state_dict().values(), run.model.state_dict().values()))
